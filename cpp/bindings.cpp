// The Python module _core: a table of contents, and the way from numpy arrays to views and from Status to exceptions.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aclnn/aclnn_backend.hpp"
#include "aclnn/cann.hpp"
#include "aclnn/probe.hpp"
#include "add_lora.hpp"
#include "backend.hpp"
#include "cpu/ceilings.hpp"
#include "cpu/cpu_backend.hpp"
#include "cpu/kernel_sets.hpp"
#include "cpu/thread_pool.hpp"
#include "gradients.hpp"
#include "leading_dims.hpp"
#include "rules.hpp"

namespace py = pybind11;

namespace {

using namespace addlora;

// Made when the module is, and never released: they live as long as the interpreter. Not at the first call: a thread
// that waits there for another one would give the interpreter lock away, see CallsWithoutLock.
struct PythonObjects {
  py::object add_lora_error;
  py::object acl_error;
  int bfloat16_num;
};
const PythonObjects* python_objects = nullptr;

const PythonObjects& objects() { return *python_objects; }

void make_objects() {
  const py::module_ errors = py::module_::import("mindspore_addlora._errors");
  const py::object bfloat16 = py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16"));
  python_objects =
      new PythonObjects{errors.attr("AddLoraError"), errors.attr("AclError"), py::cast<int>(bfloat16.attr("num"))};
}

void raise_if_refused(const Status& status) {
  if (status.ok()) return;
  const PythonObjects& python = objects();
  py::object error = python.add_lora_error(static_cast<int>(status.code), status.message);
  PyErr_SetObject(python.add_lora_error.ptr(), error.ptr());
  throw py::error_already_set();
}

std::string type_name(const py::object& object) {
  return py::cast<std::string>(py::type::of(object).attr("__qualname__"));
}

DType dtype_named(const std::string& name) {
  for (const DType known : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt32}) {
    if (name == dtype_name(known)) return known;
  }
  return DType::kOther;
}

// Calls that compute without the interpreter lock. A thread that asks for the lock back while the interpreter ends is
// ended by unwinding its stack, which C++ frames may not allow; so the end waits for these calls (atexit), and calls
// that begin after that keep the lock.
class CallsWithoutLock {
 public:
  template <class Work>
  void run(const Work& work) {
    if (ending_) {
      work();
      return;
    }
    ++under_way_;
    PyThreadState* const state = PyEval_SaveThread();
    try {
      work();
    } catch (...) {
      PyEval_RestoreThread(state);
      --under_way_;
      throw;
    }
    PyEval_RestoreThread(state);
    --under_way_;
  }

  void end() {
    ending_ = true;
    PyThreadState* const state = PyEval_SaveThread();
    while (under_way_ > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    PyEval_RestoreThread(state);
  }

  // The threads whose calls were under way do not exist in a child.
  void forget() { under_way_ = 0; }

 private:
  std::atomic<int> under_way_{0};
  std::atomic<bool> ending_{false};
};
CallsWithoutLock calls_without_lock;

// A tensor in the NPU's memory, which somebody else owns: an address, and what lies there. Contiguous.
struct DeviceTensor {
  // The operator reads memory from addresses that are multiples of this.
  static constexpr std::uint64_t kAlignment = 32;

  std::uint64_t pointer;
  std::vector<std::int64_t> shape;
  std::string dtype;
  std::size_t bytes;

  DeviceTensor(std::uint64_t pointer_, std::vector<std::int64_t> shape_, std::string dtype_, std::size_t item_bytes)
      : pointer(pointer_), shape(std::move(shape_)), dtype(std::move(dtype_)), bytes(item_bytes) {
    for (const std::int64_t n : shape) {
      if (n < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(n), &bytes)) {
        throw py::value_error("shape: expected dimensions of at least 0 whose product fits 64 bits, got " + text());
      }
    }
    // No memory reaches into the upper half of the address space: addresses are compared as signed integers.
    constexpr auto kTop = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (pointer % kAlignment != 0 || (pointer == 0 && bytes > 0) || pointer > kTop || bytes > kTop - pointer) {
      throw py::value_error("pointer: expected a device address, a multiple of 32, got " + std::to_string(pointer));
    }
  }

  void* address() const { return reinterpret_cast<void*>(pointer); }

  std::string text() const {
    std::string joined;
    for (const std::int64_t n : shape) joined += (joined.empty() ? "" : ", ") + std::to_string(n);
    return "[" + joined + "]";
  }
};

// An argument that is a numpy array or a tensor on the device, and its view; or None.
class Operand {
 public:
  Operand() = default;
  Operand(const char* name, const py::object& object) {
    if (object.is_none()) return;
    if (py::isinstance<DeviceTensor>(object)) {
      object_ = object;
      fill(object.cast<const DeviceTensor&>());
      return;
    }
    if (!py::isinstance<py::array>(object)) {
      throw py::type_error(std::string(name) + ": expected a numpy.ndarray, a device_tensor or None, got " +
                           type_name(object));
    }
    object_ = object;
    fill(py::reinterpret_borrow<py::array>(object));
  }

  const TensorView* view() const { return object_ ? &view_ : nullptr; }
  const py::object& object() const { return object_; }
  py::object dtype() const { return py::reinterpret_borrow<py::array>(object_).dtype(); }
  // The memory belongs to the array: reading whether it may be written must happen at each use.
  bool is_writable() const { return view_.on_device || py::reinterpret_borrow<py::array>(object_).writeable(); }

 private:
  void fill(const DeviceTensor& tensor) {
    view_.other_dtype = tensor.dtype.c_str();
    view_.dtype = dtype_named(tensor.dtype);
    view_.data = tensor.address();
    view_.ndim = static_cast<int>(tensor.shape.size());
    for (int i = 0; i < view_.ndim && i < kMaxDims; ++i) view_.shape[i] = tensor.shape[static_cast<std::size_t>(i)];
    if (view_.ndim <= kMaxDims) set_contiguous_strides(view_);
    view_.on_device = true;
  }

  void fill(const py::array& array) {
    const py::dtype dtype = array.dtype();
    view_.dtype = dtype_of(dtype);
    if (view_.dtype == DType::kOther) {
      name_ = std::make_shared<std::string>(py::cast<std::string>(py::str(py::handle(dtype))));
      view_.other_dtype = name_->c_str();
      // MindSpore registers a bfloat16 of its own with numpy, beside that of ml_dtypes.
      if (*name_ == "bfloat16" && dtype.itemsize() == 2) view_.dtype = DType::kBFloat16;
    }
    view_.data = const_cast<void*>(array.data());
    view_.ndim = static_cast<int>(array.ndim());
    for (int i = 0; i < view_.ndim && i < kMaxDims; ++i) {
      view_.shape[i] = array.shape(i);
      view_.strides[i] = array.strides(i);
    }
    view_.writable = array.writeable();
  }

  static DType dtype_of(const py::dtype& dtype) {
    const int num = dtype.num();
    if (num == py::detail::npy_api::NPY_FLOAT_) return native(dtype, DType::kFloat32);
    if (num == 23) return native(dtype, DType::kFloat16);  // NPY_HALF, fixed by numpy's C interface
    if (num == py::detail::npy_api::NPY_INT_) return native(dtype, DType::kInt32);
    if (num == objects().bfloat16_num) return native(dtype, DType::kBFloat16);
    if (num == py::detail::npy_api::NPY_LONG_ && dtype.itemsize() == 4) return native(dtype, DType::kInt32);
    return DType::kOther;
  }
  static DType native(const py::dtype& dtype, DType type) { return dtype.byteorder() == '>' ? DType::kOther : type; }

  py::object object_;
  TensorView view_;
  std::shared_ptr<std::string> name_;
};

std::int64_t integer(const char* name, const py::object& object) {
  // An array of one element has an index too, and numpy's bool had one.
  const bool is_integer = PyIndex_Check(object.ptr()) != 0 && PyBool_Check(object.ptr()) == 0 &&
                          !py::isinstance<py::array>(object);
  const py::object index =
      is_integer ? py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr())) : py::object();
  if (!index) {
    PyErr_Clear();
    throw py::type_error(std::string(name) + ": expected an integer, got " + type_name(object));
  }
  const long long value = PyLong_AsLongLong(index.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    PyErr_SetString(PyExc_OverflowError, (std::string(name) + ": expected a 64-bit integer, got " +
                                          py::cast<std::string>(py::str(index)))
                                             .c_str());
    throw py::error_already_set();
  }
  return value;
}

double real(const char* name, const py::object& object) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    throw py::type_error(std::string(name) + ": expected a real number, got " + type_name(object));
  }
  return value;
}

template <class T, std::size_t N>
T one_of(const char* name, const py::object& object, const std::array<std::pair<const char*, T>, N>& values) {
  std::string names;
  for (const auto& [text, value] : values) {
    if (PyUnicode_Check(object.ptr()) != 0 && PyUnicode_CompareWithASCIIString(object.ptr(), text) == 0) return value;
    names += (names.empty() ? "" : " or ") + std::string("\"") + text + "\"";
  }
  throw py::value_error(std::string(name) + ": expected " + names + ", got " + py::cast<std::string>(py::repr(object)));
}

Limits limits_of(const py::object& object) {
  return one_of<Limits, 2>("limits", object, {{{"npu", Limits::kNpu}, {"none", Limits::kNone}}});
}

Rounding rounding_of(const py::object& object) {
  return one_of<Rounding, 2>("rounding", object,
                             {{{"float32", Rounding::kFloat32}, {"device", Rounding::kDevice}}});
}

const Backend& backend_of(const py::object& object, bool on_device = false) {
  if (object.is_none()) return on_device ? aclnn_backend() : cpu_backend();
  return *one_of<const Backend*, 2>("backend", object, {{{"cpu", &cpu_backend()}, {"aclnn", &aclnn_backend()}}});
}

// A call's arguments, kept alive with the views and the Problem that refers to them.
struct Arguments {
  Operand y, x, weight_b, indices, weight_a, out;
  Problem problem;
  const Backend* backend;

  Arguments(const py::object& y_, const py::object& x_, const py::object& weight_b_, const py::object& indices_,
            const py::object& weight_a_, const py::object& layer_idx, const py::object& scale,
            const py::object& y_offset, const py::object& y_slice_size, const py::object& out_,
            const py::object& backend_, const py::object& limits, const py::object& rounding)
      : y("y", y_),
        x("x", x_),
        weight_b("weight_b", weight_b_),
        indices("indices", indices_),
        weight_a("weight_a", weight_a_),
        out("out", out_),
        backend(&backend_of(backend_, y.view() != nullptr && y.view()->on_device)) {
    problem.layer_idx = integer("layer_idx", layer_idx);
    problem.scale = real("scale", scale);
    problem.y_offset = integer("y_offset", y_offset);
    problem.y_slice_size = integer("y_slice_size", y_slice_size);
    problem.limits = limits_of(limits);
    problem.rounding = rounding_of(rounding);
    problem.y = y.view();
    problem.x = x.view();
    problem.weight_b = weight_b.view();
    problem.indices = indices.view();
    problem.weight_a = weight_a.view();
    problem.out = out.view();
    check_places();
  }
  Arguments(const Arguments&) = delete;  // the Problem points into this object
  Arguments& operator=(const Arguments&) = delete;

  // All in the host's memory, or all on the device.
  void check_places() const {
    if (y.view() == nullptr) return;  // the rules say so
    const bool on_device = y.view()->on_device;
    const std::pair<const char*, const Operand*> others[] = {
        {"x", &x}, {"weight_b", &weight_b}, {"indices", &indices}, {"weight_a", &weight_a}, {"out", &out}};
    for (const auto& [name, operand] : others) {
      if (operand->view() == nullptr || operand->view()->on_device == on_device) continue;
      throw py::type_error(std::string(name) + ": expected " + (on_device ? "a device_tensor" : "a numpy.ndarray") +
                           ", as y is, got " + type_name(operand->object()));
    }
    if (on_device && !backend->is_device()) {
      throw py::value_error("backend: expected \"aclnn\" (or None) for tensors on the device, got \"" +
                            std::string(backend->name()) + "\"");
    }
  }

  // Makes out where there is none, once the description of the inputs has been accepted.
  void allocate_out() {
    raise_if_refused(check_description(problem, *backend));
    const TensorView& view = *problem.y;
    if (view.on_device) raise_if_refused(refuse("given", "out", "a device_tensor, as y is", "None"));
    out = Operand("out", py::array(py::reinterpret_borrow<py::dtype>(y.dtype()),
                                 {static_cast<py::ssize_t>(view.shape[0]), static_cast<py::ssize_t>(view.shape[1])}));
    problem.out = out.view();
  }
};

py::object add_lora_call(const py::object& y, const py::object& x, const py::object& weight_b,
                         const py::object& indices, const py::object& weight_a, const py::object& layer_idx,
                         const py::object& scale, const py::object& y_offset, const py::object& y_slice_size,
                         const py::object& out, const py::object& backend, const py::object& limits,
                         const py::object& rounding) {
  Arguments arguments(y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size, out, backend, limits,
                      rounding);
  if (out.is_none()) arguments.allocate_out();
  Status status;
  calls_without_lock.run([&] { status = add_lora(arguments.problem, *arguments.backend); });
  raise_if_refused(status);
  return arguments.out.object();
}

// The workspace of a run: a Python buffer, held for that time, or memory of the device.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
  bool writable = true;

  Workspace(const py::object& object, bool on_device) {
    if (object.is_none()) return;
    if (on_device) {
      if (!py::isinstance<DeviceTensor>(object)) {
        throw py::type_error("workspace: expected a device_tensor or None, got " + type_name(object));
      }
      const auto& tensor = object.cast<const DeviceTensor&>();
      data = tensor.address();
      bytes = tensor.bytes;
      return;
    }
    hold(object);
    data = buffer_.buf;
    bytes = static_cast<std::size_t>(buffer_.len);
    writable = buffer_.readonly == 0;
  }
  ~Workspace() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

 private:
  void hold(const py::object& object) {
    if (PyObject_CheckBuffer(object.ptr()) == 0) {
      throw py::type_error("workspace: expected a writable buffer or None, got " + type_name(object));
    }
    if (py::isinstance<py::array>(object) && py::cast<bool>(object.attr("dtype").attr("hasobject"))) {
      raise_if_refused(refuse("workspace_memory", "workspace", "a buffer of plain bytes or numbers",
                              "an array of Python objects"));
    }
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_WRITABLE) == 0) return;
    PyErr_Clear();
    // A read-only or strided buffer: the refusal says which.
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_STRIDED_RO) != 0) throw py::error_already_set();
    if (PyBuffer_IsContiguous(&buffer_, 'C') == 0) {
      PyBuffer_Release(&buffer_);
      raise_if_refused(refuse("workspace_memory", "workspace", "a C-contiguous buffer", "a strided one"));
    }
  }

  Py_buffer buffer_{};
};

// A planned call: what add_lora_get_workspace_size returns, and add_lora_execute runs.
class Executor {
 public:
  explicit Executor(std::unique_ptr<Arguments> arguments) : arguments_(std::move(arguments)) {
    raise_if_refused(check(arguments_->problem, *arguments_->backend));
    execution_ = arguments_->backend->plan(arguments_->problem);
  }

  std::size_t workspace_size() const { return execution_->workspace_bytes(); }

  void set_repeatable() {
    if (runs_ > 0) {
      raise_if_refused(refuse("executor_state", "executor", "set_repeatable right after the first phase",
                              "an executor that has run"));
    }
    execution_->set_repeatable();
    repeatable_ = true;
  }

  void execute(const py::object& workspace, const py::object& stream) {
    void* const stream_handle = stream.is_none() ? nullptr : handle_of(stream);
    if (runs_ > 0 && !repeatable_) {
      raise_if_refused(refuse("executor_state", "executor", "one that has not run, or a repeatable one",
                              "a spent executor"));
    }
    const Workspace given(workspace, arguments_->problem.y->on_device);
    if (execution_->uses_workspace()) {
      raise_if_refused(check_workspace(arguments_->problem, workspace_size(), given.data, given.bytes, given.writable));
    }
    if (arguments_->problem.y->shape[0] > 0 && !arguments_->out.is_writable()) {
      raise_if_refused(refuse("out_memory", "out", "a writable tensor", "a read-only one"));
    }
    // Counted before the lock is released, so that two threads cannot spend one executor twice.
    ++runs_;
    Status status;
    try {
      calls_without_lock.run([&] {
        status = check_indices(arguments_->problem);
        if (status.ok()) status = execution_->run(given.data, stream_handle);
      });
    } catch (...) {
      --runs_;
      throw;
    }
    if (!status.ok()) --runs_;
    raise_if_refused(status);
  }

 private:
  static void* handle_of(const py::object& stream) {
    return reinterpret_cast<void*>(static_cast<std::intptr_t>(integer("stream", stream)));
  }

  std::unique_ptr<Arguments> arguments_;
  std::unique_ptr<Execution> execution_;
  int runs_ = 0;
  bool repeatable_ = false;
};

py::tuple get_workspace_size(const py::object& y, const py::object& x, const py::object& weight_b,
                             const py::object& indices, const py::object& weight_a, const py::object& layer_idx,
                             const py::object& scale, const py::object& y_offset, const py::object& y_slice_size,
                             const py::object& out, const py::object& backend, const py::object& limits,
                             const py::object& rounding) {
  auto executor = std::make_unique<Executor>(std::make_unique<Arguments>(
      y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size, out, backend, limits, rounding));
  const std::size_t size = executor->workspace_size();
  return py::make_tuple(size, std::move(executor));
}

void execute(const py::object& workspace, const py::object& executor, const py::object& stream) {
  if (executor.is_none()) {
    raise_if_refused(refuse("executor_given", "executor", "the one that add_lora_get_workspace_size returned", "None"));
  }
  if (!py::isinstance<Executor>(executor)) {
    throw py::type_error("executor: expected an Executor, got " + type_name(executor));
  }
  executor.cast<Executor&>().execute(workspace, stream);
}

// A tensor that is only described: (dtype name, shape), None standing for a dimension that is not known yet.
struct Description {
  std::string dtype;
  TensorView view;

  explicit Description(const py::tuple& described) : dtype(py::cast<std::string>(described[0])) {
    view.other_dtype = dtype.c_str();
    view.dtype = dtype_named(dtype);
    const auto shape = py::cast<py::tuple>(described[1]);
    view.ndim = static_cast<int>(shape.size());
    for (int i = 0; i < view.ndim && i < kMaxDims; ++i) {
      const py::object dimension = shape[static_cast<std::size_t>(i)];
      view.shape[i] = dimension.is_none() ? kUnknown : py::cast<std::int64_t>(dimension);
    }
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;
};

// The rules for a call with leading dimensions, before there is any data: what MindSpore's layers ask at compile time.
void check_described(const py::tuple& y, const py::tuple& x, const py::tuple& weight_b, const py::tuple& indices,
                     const std::optional<py::tuple>& weight_a, const py::object& layer_idx, const py::object& y_offset,
                     const py::object& y_slice_size, const py::object& limits, const py::object& rounding) {
  const Description y_view(y), x_view(x), b_view(weight_b), indices_view(indices);
  std::optional<Description> a_view;
  if (weight_a) a_view.emplace(*weight_a);
  Rows rows;
  raise_if_refused(collapse_leading_dims(y_view.view, x_view.view, indices_view.view, rows));
  Problem problem;
  problem.y = &rows.y;
  problem.x = &rows.x;
  problem.weight_b = &b_view.view;
  problem.indices = &rows.indices;
  problem.weight_a = a_view ? &a_view->view : nullptr;
  problem.layer_idx = integer("layer_idx", layer_idx);
  problem.y_offset = integer("y_offset", y_offset);
  problem.y_slice_size = integer("y_slice_size", y_slice_size);
  problem.limits = limits_of(limits);
  problem.rounding = rounding_of(rounding);
  raise_if_refused(check_description(problem, cpu_backend()));
}

// One gradient of the operator, for the benchmark: g in y's place, `out` of the shape of what is wanted.
void gradient(const std::string& wanted, const py::object& g, const py::object& x, const py::object& weight_b,
              const py::object& indices, const py::object& weight_a, const py::object& layer_idx,
              const py::object& scale, const py::object& y_offset, const py::object& out) {
  Arguments arguments(g, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, py::int_(-1), py::none(),
                      py::none(), py::str("none"), py::str("float32"));
  raise_if_refused(check_description(arguments.problem, *arguments.backend));
  raise_if_refused(check_indices(arguments.problem));
  const Operand result("out", out);
  const Operand& like = wanted == "x" ? arguments.x : wanted == "weight_a" ? arguments.weight_a : arguments.weight_b;
  const TensorView* shape = like.view();
  if (result.view() == nullptr || shape == nullptr || result.view()->shape_text() != shape->shape_text() ||
      result.view()->dtype != shape->dtype || !result.view()->is_contiguous() || !result.is_writable()) {
    throw py::value_error("out: expected a writable, C-contiguous array like " + wanted);
  }
  arguments.problem.out = result.view();
  const Gradient which = wanted == "x"          ? Gradient::kX
                         : wanted == "weight_a" ? Gradient::kWeightA
                                                : Gradient::kWeightB;
  calls_without_lock.run([&] { compute_gradient(arguments.problem, which); });
}

// What the self test asks: (code of each phase, workspace bytes); y and out hold what the device left in them.
py::tuple probe(const py::object& y, const py::object& x, const py::object& weight_b, const py::object& indices,
                const py::object& weight_a, const py::object& layer_idx, const py::object& scale,
                const py::object& y_offset, const py::object& y_slice_size, const py::object& out) {
  Arguments arguments(y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, py::int_(-1), out,
                      py::str("aclnn"), py::str("npu"), py::str("float32"));
  raise_if_refused(check(arguments.problem, *arguments.backend));
  if (const std::string reason = aclnn::unavailable(); !reason.empty()) throw py::value_error("backend: " + reason);
  arguments.problem.y_slice_size = integer("y_slice_size", y_slice_size);
  aclnn::Answer answer;
  calls_without_lock.run([&] { answer = aclnn::probe(arguments.problem); });
  return py::make_tuple(answer.first_phase, answer.second_phase, answer.workspace_bytes);
}

void set_num_threads(const py::object& object) {
  const std::int64_t threads = integer("n", object);
  if (threads < 1) throw py::value_error("n: expected at least 1 thread, got " + std::to_string(threads));
  cpu::set_thread_count(static_cast<int>(std::min<std::int64_t>(threads, 1 << 20)));
}

std::optional<std::string> last_kernel_set_name() {
  const char* name = last_kernel_set();
  return name == nullptr ? std::nullopt : std::optional<std::string>(name);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of mindspore_addlora. Use mindspore_addlora.raw, which documents it.";
  make_objects();
  module.attr("__version__") = ADDLORA_VERSION;

  py::module_::import("atexit").attr("register")(py::cpp_function([] { calls_without_lock.end(); }));
  pthread_atfork(nullptr, nullptr, [] { calls_without_lock.forget(); });

  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const aclnn::Error& error) {
      const py::object& type = objects().acl_error;
      PyErr_SetObject(type.ptr(), type(error.code(), error.what()).ptr());
    }
  });

  py::class_<DeviceTensor>(module, "DeviceTensor", "A tensor in the NPU's memory: made by device_tensor.")
      .def(py::init<std::uint64_t, std::vector<std::int64_t>, std::string, std::size_t>())
      .def_readonly("pointer", &DeviceTensor::pointer)
      .def_readonly("dtype", &DeviceTensor::dtype)
      .def_property_readonly("shape", [](const DeviceTensor& tensor) { return py::tuple(py::cast(tensor.shape)); })
      .def("__repr__", [](const DeviceTensor& tensor) {
        return "device_tensor(" + std::to_string(tensor.pointer) + ", " + tensor.text() + ", \"" + tensor.dtype + "\")";
      });
  py::class_<Executor>(module, "Executor", "A planned call: made by add_lora_get_workspace_size.")
      .def("set_repeatable", &Executor::set_repeatable,
           "Lets the executor run more than once. To be called right after the first phase.");

  module.def("add_lora", &add_lora_call);
  module.def("add_lora_get_workspace_size", &get_workspace_size);
  module.def("add_lora_execute", &execute);
  module.def("gradient", &gradient);
  module.def("probe", &probe);

  module.def("check_described", &check_described);
  // What a block of a bank must keep for the device.
  module.def("check_device_sizes", [](std::int64_t w, std::int64_t l, std::int64_t h2, std::int64_t r,
                                      std::optional<std::int64_t> h1) {
    raise_if_refused(check_device_sizes(w, l, h2, r, h1.value_or(kUnknown)));
  });
  module.def("refuse_missing", [](const std::string& argument) {
    raise_if_refused(refuse("given", argument.c_str(), "a tensor", "None"));
  });
  module.def("refuse_width", [](const std::string& argument, const std::string& name, std::int64_t width) {
    const std::string rule = name == "H1" ? "h1_width" : name == "H2" ? "h2_width" : "h3_width";
    raise_if_refused(refuse(rule.c_str(), argument.c_str(),
                            name + " a multiple of " + std::to_string(kMultiple) + " on the NPU",
                            name + " = " + std::to_string(width)));
  });
  module.attr("LIMITS") = py::dict(py::arg("multiple") = kMultiple, py::arg("rank") = kMaxRank,
                                   py::arg("adapters") = kMaxAdapters, py::arg("layers") = kMaxLayers);
  module.def("rules", [] {
    py::list table;
    for (const Rule& rule : rules()) {
      table.append(py::make_tuple(rule.name, rule.applies_to, rule.text, static_cast<int>(rule.code), rule.lifted));
    }
    return table;
  });
  module.def("backend_info", [](const py::object& name) {
    const BackendInfo info = backend_of(name).info();
    return py::make_tuple(info.available, info.reason, info.detail);
  });
  module.def("kernel_sets", [] {
    py::list names;
    for (const cpu::KernelSet* set : cpu::available_kernel_sets()) names.append(set->name);
    return py::tuple(names);
  });
  module.def("last_kernel_set", &last_kernel_set_name);
  module.def("measure_flops", [] {
    const py::gil_scoped_release release;
    return cpu::measure_flops();
  });
  module.def("measure_read", [](const py::buffer& buffer) {
    const py::buffer_info info = buffer.request();
    const py::gil_scoped_release release;
    return cpu::measure_read(info.ptr, static_cast<std::size_t>(info.size * info.itemsize));
  });
  module.def("set_num_threads", &set_num_threads);
  module.def("get_num_threads", &cpu::thread_count);
}
