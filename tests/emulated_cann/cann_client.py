"""A thin ctypes client of the (emulated) CANN: enough to call aclnnAddLora with numpy arrays, checking nothing."""

import ctypes
from pathlib import Path

import numpy as np

FLOAT, FLOAT16, INT8, INT32, INT64, BF16 = 0, 1, 2, 3, 9, 27
NCHW, NHWC, ND, FRACTAL_NZ = 0, 1, 2, 29
HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 0, 1, 2, 3

_DTYPES = {"float32": FLOAT, "float16": FLOAT16, "int8": INT8, "int32": INT32, "int64": INT64}

_pointer, _int, _int64, _uint64, _size = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_size_t)
_dims = ctypes.POINTER(ctypes.c_int64)

_RUNTIME = {
    "aclInit": (_int, ctypes.c_char_p),
    "aclFinalize": (_int,),
    "aclGetRecentErrMsg": (ctypes.c_char_p,),
    "aclrtGetSocName": (ctypes.c_char_p,),
    "aclrtGetDeviceCount": (_int, ctypes.POINTER(ctypes.c_uint32)),
    "aclrtSetDevice": (_int, ctypes.c_int32),
    "aclrtResetDevice": (_int, ctypes.c_int32),
    "aclrtCreateStream": (_int, ctypes.POINTER(_pointer)),
    "aclrtDestroyStream": (_int, _pointer),
    "aclrtSynchronizeStream": (_int, _pointer),
    "aclrtSynchronizeDevice": (_int,),
    "aclrtCreateEvent": (_int, ctypes.POINTER(_pointer)),
    "aclrtDestroyEvent": (_int, _pointer),
    "aclrtRecordEvent": (_int, _pointer, _pointer),
    "aclrtStreamWaitEvent": (_int, _pointer, _pointer),
    "aclrtMalloc": (_int, ctypes.POINTER(_pointer), _size, _int),
    "aclrtFree": (_int, _pointer),
    "aclrtMallocHost": (_int, ctypes.POINTER(_pointer), _size),
    "aclrtFreeHost": (_int, _pointer),
    "aclrtMemcpy": (_int, _pointer, _size, _pointer, _size, _int),
    "aclrtMemcpyAsync": (_int, _pointer, _size, _pointer, _size, _int, _pointer),
    "aclrtMemset": (_int, _pointer, _size, ctypes.c_int32, _size),
}
_NNOPBASE = {
    "aclnnInit": (_int, ctypes.c_char_p),
    "aclCreateTensor": (_pointer, _dims, _uint64, _int, _dims, _int64, _int, _dims, _uint64, _pointer),
    "aclDestroyTensor": (_int, _pointer),
    "aclSetAclOpExecutorRepeatable": (_int, _pointer),
    "aclDestroyAclOpExecutor": (_int, _pointer),
    "aclSetTensorAddr": (_int, _pointer, _size, _pointer, _pointer),
}
_OPERATOR = {
    "aclnnAddLoraGetWorkspaceSize": (
        _int, _pointer, _pointer, _pointer, _pointer, _pointer, _int64, ctypes.c_double, _int64, _int64, _pointer,
        ctypes.POINTER(_uint64), ctypes.POINTER(_pointer)),
    "aclnnAddLora": (_int, _pointer, _uint64, _pointer, _pointer),
}


class CannError(Exception):
    def __init__(self, function, code, text):
        super().__init__(f"{function}: {code}: {text}")
        self.function, self.code, self.text = function, code, text


class Cann:
    """The three libraries of one layout. `cann.aclrtMalloc(...)` raises CannError unless it returns 0."""

    def __init__(self, folder, operator_library=None):
        folder = Path(folder)
        runtime = folder / "libacl_rt.so"
        if not runtime.exists():
            runtime = folder / "libascendcl.so"
        if operator_library is None:
            operator_library = folder / "libopapi_math.so"
            if not operator_library.exists():
                operator_library = folder / "libopapi.so"
        self._functions = {}
        for path, declarations in ((runtime, _RUNTIME), (folder / "libnnopbase.so", _NNOPBASE),
                                   (operator_library, _OPERATOR)):
            library = ctypes.CDLL(str(path))
            for name, (result, *arguments) in declarations.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                self._functions[name] = function

    def __getattr__(self, name):
        function = self._functions[name]
        if function.restype is not _int:
            return function

        def checked(*arguments):
            code = function(*arguments)
            if code:
                text = self._functions["aclGetRecentErrMsg"]()
                raise CannError(name, code, text.decode() if text else None)

        return checked

    def start(self, device=0):
        self.aclInit(None)
        self.aclrtSetDevice(device)

    def stream(self):
        handle = _pointer()
        self.aclrtCreateStream(ctypes.byref(handle))
        return handle

    def malloc(self, count):
        address = _pointer()
        self.aclrtMalloc(ctypes.byref(address), count, 0)
        return address.value

    def upload(self, array):
        array = np.ascontiguousarray(array)
        address = self.malloc(max(array.nbytes, 1))
        self.aclrtMemcpy(address, array.nbytes, array.ctypes.data, array.nbytes, HOST_TO_DEVICE)
        return address

    def download(self, address, like):
        result = np.empty_like(like)
        self.aclrtMemcpy(result.ctypes.data, result.nbytes, address, result.nbytes, DEVICE_TO_HOST)
        return result

    def tensor(self, address, shape, dtype, *, strides=None, offset=0, format=ND):
        if strides is None:
            strides = [int(np.prod(shape[i + 1:], dtype=np.int64)) for i in range(len(shape))]
        as_dims = lambda values: (ctypes.c_int64 * max(len(values), 1))(*values)
        dtype = _DTYPES.get(dtype, dtype)
        return self.aclCreateTensor(as_dims(shape), len(shape), dtype, as_dims(strides), offset, format,
                                    as_dims(shape), len(shape), address)

    def plan(self, tensors, *, layer_idx=0, scale=1.0, y_offset=0, y_slice_size=-1):
        """First phase. `tensors`: handles of y, x, weight_b, indices, weight_a (or None), out."""
        y, x, weight_b, indices, weight_a, out = tensors
        size, executor = _uint64(12345), _pointer()
        self.aclnnAddLoraGetWorkspaceSize(y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size,
                                          out, ctypes.byref(size), ctypes.byref(executor))
        return size.value, executor


class AddLora:
    """One set of operands on the device, with its tensors; a context manager that gives everything back."""

    def __init__(self, cann, y, x, weight_b, indices, weight_a=None, **tensor_options):
        self.cann, self.y = cann, y
        arrays = [y, x, weight_b, indices, weight_a, np.full_like(y, 7)]
        self.addresses = [None if each is None else cann.upload(each) for each in arrays]
        self.tensors = [
            None if each is None else cann.tensor(address, each.shape, each.dtype.name, **tensor_options)
            for each, address in zip(arrays, self.addresses)]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for tensor in self.tensors:
            if tensor:
                self.cann.aclDestroyTensor(tensor)
        for address in self.addresses:
            if address:
                self.cann.aclrtFree(address)

    def run(self, stream, **scalars):
        """Both phases and a synchronisation; returns what y and out hold then."""
        size, executor = self.cann.plan(self.tensors, **scalars)
        workspace = self.cann.malloc(size) if size else None
        try:
            self.cann.aclnnAddLora(workspace, size, executor, stream)
            self.cann.aclrtSynchronizeStream(stream)
        finally:
            if workspace:
                self.cann.aclrtFree(workspace)
        return self.download("y"), self.download("out")

    def download(self, name):
        return self.cann.download(self.addresses[{"y": 0, "out": 5}[name]], self.y)
