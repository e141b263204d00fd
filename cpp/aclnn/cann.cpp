#include "cann.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <vector>

namespace addlora::aclnn {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::string trimmed(const std::string& text) {
  const char* const blanks = " \t\r";
  const std::size_t first = text.find_first_not_of(blanks);
  return first == std::string::npos ? std::string() : text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (part = trimmed(part); !part.empty()) parts.push_back(part);
  }
  return parts;
}

// Opened for as long as the process lives: CANN's threads may run in it.
struct Library {
  void* handle = nullptr;
  std::string path;
};

std::string path_of(void* symbol, const std::string& asked_for) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : asked_for;
}

// The first of these files that opens and has the symbol.
Library open_first(const std::vector<std::string>& files, const char* symbol, std::string& tried) {
  for (const std::string& file : files) {
    void* handle = dlopen(file.c_str(), RTLD_LAZY);
    if (handle == nullptr) {
      tried += (tried.empty() ? "" : "; ") + std::string(dlerror());
      continue;
    }
    if (void* found = dlsym(handle, symbol); found != nullptr) return {handle, path_of(found, file)};
    tried += (tried.empty() ? "" : "; ") + file + " has no " + symbol;
    dlclose(handle);
  }
  return {};
}

// A library of the toolkit: where the environment says that it is installed, then wherever the loader looks. All names in
// one place before the next place: two installations must not be mixed.
std::vector<std::string> toolkit_files(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const char* variable : {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"}) {
    const std::string home = environment(variable);
    if (home.empty()) continue;
    for (const std::string& name : names) files.push_back(home + "/lib64/" + name);
  }
  files.insert(files.end(), names.begin(), names.end());
  return files;
}

// The packages of an operator folder that its config.ini puts first.
std::vector<std::string> vendors_by_priority(const std::string& vendors) {
  std::ifstream config(vendors + "/config.ini");
  for (std::string line; std::getline(config, line);) {
    const std::size_t equals = line.find('=');
    if (equals == std::string::npos || trimmed(line.substr(0, equals)) != "load_priority") continue;
    return split(line.substr(equals + 1), ',');
  }
  return {};
}

// Operator packages in the order in which CANN's own plugins look: custom ones, vendors' by their priority, CANN's.
std::vector<std::string> operator_files() {
  const std::string custom = "/op_api/lib/libcust_opapi.so";
  std::vector<std::string> files;
  for (const std::string& folder : split(environment("ASCEND_CUSTOM_OPP_PATH"), ':')) files.push_back(folder + custom);
  if (const std::string opp = environment("ASCEND_OPP_PATH"); !opp.empty()) {
    const std::string vendors = opp + "/vendors";
    for (const std::string& name : vendors_by_priority(vendors)) files.push_back(vendors + "/" + name + custom);
  }
  // Newer CANN has the operator in a library of its field, older CANN in the one of all operators.
  for (const std::string& file : toolkit_files({"libopapi_math.so", "libopapi.so"})) files.push_back(file);
  return files;
}

template <class Function>
void look_up(const Library& library, const char* name, Function& function, std::string& missing) {
  void* symbol = library.handle == nullptr ? nullptr : dlsym(library.handle, name);
  if (symbol == nullptr) {
    if (library.handle != nullptr) missing += (missing.empty() ? "" : "; ") + library.path + " has no " + name;
    return;
  }
  static_assert(sizeof function == sizeof symbol);
  std::memcpy(&function, &symbol, sizeof symbol);
}

Cann search() {
  Cann found;
  std::string& missing = found.missing;
  const auto note = [&missing](const char* what, const std::string& tried) {
    missing += (missing.empty() ? "" : "; ") + std::string(what) + " not found (" + tried + ")";
  };
  std::string tried;
  // Newer CANN has the runtime in libacl_rt.so, and may still have libascendcl.so beside it.
  const Library runtime = open_first(toolkit_files({"libascendcl.so", "libacl_rt.so"}), "aclrtMalloc", tried);
  if (runtime.handle == nullptr) note("CANN's runtime", tried);
  tried.clear();
  const Library nnopbase = open_first(toolkit_files({"libnnopbase.so"}), "aclCreateTensor", tried);
  if (nnopbase.handle == nullptr) note("libnnopbase.so", tried);
  tried.clear();
  const Library op = open_first(operator_files(), "aclnnAddLoraGetWorkspaceSize", tried);
  if (op.handle == nullptr) note("the operator aclnnAddLora", tried);

  Functions& call = found.call;
  look_up(runtime, "aclInit", call.aclInit, missing);
  look_up(runtime, "aclGetRecentErrMsg", call.aclGetRecentErrMsg, missing);
  look_up(runtime, "aclrtGetSocName", call.aclrtGetSocName, missing);
  look_up(runtime, "aclrtGetDevice", call.aclrtGetDevice, missing);
  look_up(runtime, "aclrtSetDevice", call.aclrtSetDevice, missing);
  look_up(runtime, "aclrtCreateStream", call.aclrtCreateStream, missing);
  look_up(runtime, "aclrtDestroyStream", call.aclrtDestroyStream, missing);
  look_up(runtime, "aclrtSynchronizeStream", call.aclrtSynchronizeStream, missing);
  look_up(runtime, "aclrtCreateEvent", call.aclrtCreateEvent, missing);
  look_up(runtime, "aclrtRecordEvent", call.aclrtRecordEvent, missing);
  look_up(runtime, "aclrtSynchronizeEvent", call.aclrtSynchronizeEvent, missing);
  look_up(runtime, "aclrtDestroyEvent", call.aclrtDestroyEvent, missing);
  look_up(runtime, "aclrtMalloc", call.aclrtMalloc, missing);
  look_up(runtime, "aclrtFree", call.aclrtFree, missing);
  look_up(runtime, "aclrtMemcpy", call.aclrtMemcpy, missing);
  look_up(runtime, "aclrtMemcpyAsync", call.aclrtMemcpyAsync, missing);
  look_up(nnopbase, "aclnnInit", call.aclnnInit, missing);
  look_up(nnopbase, "aclCreateTensor", call.aclCreateTensor, missing);
  look_up(nnopbase, "aclDestroyTensor", call.aclDestroyTensor, missing);
  look_up(nnopbase, "aclSetAclOpExecutorRepeatable", call.aclSetAclOpExecutorRepeatable, missing);
  look_up(nnopbase, "aclDestroyAclOpExecutor", call.aclDestroyAclOpExecutor, missing);
  look_up(op, "aclnnAddLoraGetWorkspaceSize", call.aclnnAddLoraGetWorkspaceSize, missing);
  look_up(op, "aclnnAddLora", call.aclnnAddLora, missing);
  found.runtime_path = runtime.path;
  found.nnopbase_path = nnopbase.path;
  found.operator_path = op.path;
  found.found = missing.empty();
  if (found.found) {
    const char* soc = call.aclrtGetSocName();
    found.soc = soc == nullptr ? "" : soc;
  }
  return found;
}

}  // namespace

const Cann& cann() {
  static const Cann found = search();
  return found;
}

bool supports_soc(const std::string& soc) {
  return soc.compare(0, 10, "Ascend910B") == 0 || soc.compare(0, 10, "Ascend310P") == 0;
}

std::string unavailable() {
  const Cann& found = cann();
  if (!found.found) return found.missing;
  if (!found.soc.empty() && !supports_soc(found.soc)) {
    return "the operator has no kernels for this SoC, " + found.soc +
           " (it has for Ascend910B, Atlas A2, and Ascend310P)";
  }
  return {};
}

void enter_device() {
  static std::once_flag once;
  std::call_once(once, [] {
    const int code = cann().call.aclInit(nullptr);
    if (code != kAlreadyInitialised) require(code, "aclInit");
    require(cann().call.aclnnInit(nullptr), "aclnnInit");
  });
  // Asked each time: others may have set or reset the thread's device since.
  std::int32_t device = 0;
  if (cann().call.aclrtGetDevice(&device) != 0) require(cann().call.aclrtSetDevice(0), "aclrtSetDevice");
}

void try_enter_device() noexcept {
  try {
    enter_device();
  } catch (const Error&) {  // what is called next fails too
  }
}

std::string with_text(const std::string& failure) {
  const char* text = cann().call.aclGetRecentErrMsg();
  return failure + (text == nullptr || *text == '\0' ? "" : ": " + std::string(text));
}

void require(int code, const char* function) {
  if (code == 0) return;
  throw Error(code, with_text(std::string(function) + " failed with code " + std::to_string(code)));
}

}  // namespace addlora::aclnn
