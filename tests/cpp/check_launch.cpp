#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "checks.hpp"
#include "cpu/thread_pool.hpp"
#include "views.hpp"

using addlora::DType;

extern "C" int AddLora(int nparam, void** params, int* ndims, std::int64_t** shapes, const char** dtypes, void* stream,
                       void* extra);

namespace {

// The arguments as MindSpore hands them over; each in memory of its own size.
struct Launch {
  std::vector<Tensor> tensors;
  std::vector<const char*> dtypes;

  Launch() {
    for (const auto& shape : std::vector<std::vector<std::int64_t>>{{3, 8}, {3, 4}, {2, 1, 8, 2}, {3}, {2, 1, 2, 4}}) {
      add(shape.size() == 1 ? "int32" : "float32", shape, shape.size() == 1 ? 4 : 4);
    }
    for (std::size_t i : {0, 1, 2, 4}) {
      for (std::int64_t e = 0; e < tensors[i].count(); ++e) write(tensors[i].element(e), 1.0f);
    }
    const std::int32_t indices[] = {1, -1, 0};
    std::memcpy(tensors[3].view.data, indices, sizeof indices);
    set_scalar(5, "int64", std::int64_t{0});
    set_scalar(6, "float32", 0.5f);
    set_scalar(7, "int64", std::int64_t{0});
    set_scalar(8, "int64", std::int64_t{0});
    add("float32", {3, 8}, 4);
  }

  template <class T>
  static void write(char* to, T value) {
    std::memcpy(to, &value, sizeof value);
  }

  void add(const char* dtype, const std::vector<std::int64_t>& shape, std::size_t item) {
    tensors.push_back(sized(shape, item));
    dtypes.push_back(dtype);
  }

  static Tensor sized(const std::vector<std::int64_t>& shape, std::size_t item) {
    Tensor tensor = plain_tensor(DType::kFloat32, shape);
    tensor.bytes = static_cast<std::size_t>(tensor.count()) * item;
    tensor.memory.reset(new char[tensor.bytes]());
    tensor.view.data = tensor.memory.get();
    return tensor;
  }

  template <class T>
  void set_scalar(std::size_t i, const char* dtype, T value, const std::vector<std::int64_t>& shape = {}) {
    Tensor tensor = sized(shape, sizeof value);
    if (tensor.count() > 0) write(tensor.memory.get(), value);
    if (i < tensors.size()) {
      tensors[i] = std::move(tensor);
      dtypes[i] = dtype;
    } else {
      tensors.push_back(std::move(tensor));
      dtypes.push_back(dtype);
    }
  }

  // The first column of the result, or the words of the refusal.
  std::string run() {
    std::vector<void*> params;
    std::vector<int> ndims;
    std::vector<std::int64_t*> shapes;
    for (Tensor& tensor : tensors) {
      params.push_back(tensor.view.data);
      ndims.push_back(tensor.view.ndim);
      shapes.push_back(tensor.view.shape);
    }
    try {
      AddLora(static_cast<int>(params.size()), params.data(), ndims.data(), shapes.data(), dtypes.data(), nullptr,
              nullptr);
    } catch (const std::invalid_argument& refused) {
      return refused.what();
    }
    std::string text;
    for (std::int64_t row = 0; row < 3; ++row) {
      float value;
      std::memcpy(&value, tensors.back().element(row * 8), sizeof value);
      text += std::to_string(static_cast<int>(value)) + " ";
    }
    return text;
  }
};

}  // namespace

std::string check_launch() {
  addlora::cpu::set_thread_count(2);
  const struct {
    const char* name;
    std::function<void(Launch&)> change;
    const char* expected;  // in the answer
  } cases[] = {
      {"as it should be", [](Launch&) {}, "5 1 5 "},
      {"indices of 64 bits",
       [](Launch& call) {
         call.tensors[3] = Launch::sized({3}, 8);
         call.dtypes[3] = "int64";
       },
       "5 5 5 "},
      {"indices of 8 bits, of a rank that was not known",
       [](Launch& call) {
         call.tensors[3] = Launch::sized({3}, 1);
         call.dtypes[3] = "int8";
       },
       "indices: expected int32 or int64, got int8"},
      {"a scale of double precision", [](Launch& call) { call.set_scalar(6, "float64", 1.0); }, "9 1 9 "},
      {"a scale of one element in a row", [](Launch& call) { call.set_scalar(6, "float32", 1.0f, {1}); }, "9 1 9 "},
      {"a scale without an element", [](Launch& call) { call.set_scalar(6, "float32", 1.0f, {0}); },
       "scale: expected one number"},
      {"a scale of two elements", [](Launch& call) { call.set_scalar(6, "float32", 1.0f, {2}); },
       "scale: expected one number"},
      {"a scale of half precision",
       [](Launch& call) { call.set_scalar(6, "float16", std::uint16_t{0x3c00}); },
       "scale: expected int32, int64, float32 or float64, got float16"},
      {"another number of parameters", [](Launch& call) { call.tensors.pop_back(); }, "called with 9 parameters"},
  };
  for (const auto& c : cases) {
    Launch call;
    c.change(call);
    const std::string got = call.run();
    if (got.find(c.expected) == std::string::npos) {
      return std::string(c.name) + ": expected \"" + c.expected + "\", got \"" + got + "\"";
    }
  }
  return {};
}
