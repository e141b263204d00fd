// CANN as this project calls it: typed function pointers, found and opened at run time. Nothing is linked, so the same
// build works with and without CANN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace addlora::aclnn {

using Stream = void*;
using Event = void*;
struct Tensor;    // aclTensor
struct Executor;  // aclOpExecutor

enum DataType : int { kAclFloat16 = 1, kAclInt32 = 3 };
enum Format : int { kFormatNd = 2 };
enum CopyKind : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
enum MallocPolicy : int { kHugeFirst = 0 };
inline constexpr int kAlreadyInitialised = 100002;

// The functions, by their names in CANN. The types are written out: a type deduced from a call's arguments would pass
// the scale as a float, and the operator would read half of a double.
struct Functions {
  int (*aclInit)(const char* config);
  const char* (*aclGetRecentErrMsg)();
  const char* (*aclrtGetSocName)();
  int (*aclrtGetDevice)(std::int32_t* device);
  int (*aclrtSetDevice)(std::int32_t device);
  int (*aclrtCreateStream)(Stream* stream);
  int (*aclrtDestroyStream)(Stream stream);
  int (*aclrtSynchronizeStream)(Stream stream);
  int (*aclrtCreateEvent)(Event* event);
  int (*aclrtRecordEvent)(Event event, Stream stream);
  int (*aclrtSynchronizeEvent)(Event event);
  int (*aclrtDestroyEvent)(Event event);
  int (*aclrtMalloc)(void** memory, std::size_t bytes, int policy);
  int (*aclrtFree)(void* memory);
  int (*aclrtMemcpy)(void* to, std::size_t to_bytes, const void* from, std::size_t bytes, int kind);
  int (*aclrtMemcpyAsync)(void* to, std::size_t to_bytes, const void* from, std::size_t bytes, int kind, Stream stream);
  int (*aclnnInit)(const char* config);
  Tensor* (*aclCreateTensor)(const std::int64_t* shape, std::uint64_t dims, int dtype, const std::int64_t* strides,
                             std::int64_t offset, int format, const std::int64_t* storage_shape,
                             std::uint64_t storage_dims, void* data);
  int (*aclDestroyTensor)(const Tensor* tensor);
  int (*aclSetAclOpExecutorRepeatable)(Executor* executor);
  int (*aclDestroyAclOpExecutor)(Executor* executor);
  int (*aclnnAddLoraGetWorkspaceSize)(const Tensor* y, const Tensor* x, const Tensor* weight_b, const Tensor* indices,
                                      const Tensor* weight_a, std::int64_t layer_idx, double scale,
                                      std::int64_t y_offset, std::int64_t y_slice_size, const Tensor* out,
                                      std::uint64_t* workspace_size, Executor** executor);
  int (*aclnnAddLora)(void* workspace, std::uint64_t workspace_size, Executor* executor, Stream stream);
};

struct Cann {
  bool found = false;
  std::string missing;  // what was looked for in vain, and where
  std::string runtime_path;
  std::string nnopbase_path;
  std::string operator_path;
  std::string soc;
  Functions call{};
};

// Searched for once, at the first call.
const Cann& cann();

// The devices that the operator has kernels for, by the names of their SoCs.
bool supports_soc(const std::string& soc);

// Why the operator cannot run here; empty where it can.
std::string unavailable();

// Everything below a call into CANN needs a device of the calling thread's: the one that it is on already, which MindSpore
// or the caller chose, or else the first. CANN is initialised once per process, and others in the process may have been
// first.
void enter_device();

// The same where nothing can be thrown: for giving things back, in whatever thread that happens.
void try_enter_device() noexcept;

// A call into CANN that failed: its code, and its text.
class Error : public std::runtime_error {
 public:
  Error(int code, const std::string& message) : std::runtime_error(message), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

// Throws where a call has failed. CANN's own text is of the calling thread's last failure.
void require(int code, const char* function);

// What failed, and CANN's own text where it has one.
std::string with_text(const std::string& failure);

}  // namespace addlora::aclnn
