"""The emulated CANN against the facts it was written from, through ctypes alone."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import emulated_cann  # noqa: E402
from cann_client import (  # noqa: E402
    DEVICE_TO_DEVICE, DEVICE_TO_HOST, FRACTAL_NZ, HOST_TO_DEVICE, NCHW, NHWC, AddLora, Cann, CannError)

F16 = np.float16


@pytest.fixture
def control(emulated_cann_build):
    control = emulated_cann.Control(emulated_cann_build)
    control.reset()
    yield control
    control.reset()


@pytest.fixture
def cann(control, emulated_cann_build):
    cann = Cann(emulated_cann_build / "layouts/newer/lib64")
    cann.start()
    return cann


def code_of(function, *arguments, **keywords):
    with pytest.raises(CannError) as caught:
        function(*arguments, **keywords)
    return caught.value.code


def operands(b=3, h1=32, h2=16, h3=48, r=16, w=4, layers=2, indices=None, with_a=True, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(F16)
    indices = np.arange(b) % w if indices is None else indices
    return {
        "y": draw(b, h3),
        "x": draw(b, h1 if with_a else r),
        "weight_b": draw(w, layers, h2, r),
        "indices": np.asarray(indices, np.int32),
        "weight_a": draw(w, layers, r, h1) if with_a else None,
    }


def expected(y, x, weight_b, indices, weight_a=None, layer_idx=0, scale=1.0, y_offset=0):
    """The device's rounding points, with sums in float64: equal to the device's but where a sum is near a tie."""
    result = y.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        half_scale = np.float32(F16(np.float32(scale)))
        for row, index in enumerate(indices):
            if not 0 <= index < len(weight_b):
                continue
            z1 = x[row]
            if weight_a is not None:
                z1 = (weight_a[index, layer_idx].astype(np.float64) @ z1.astype(np.float64)).astype(np.float32).astype(F16)
            z2 = (weight_b[index, layer_idx].astype(np.float64) @ z1.astype(np.float64)).astype(np.float32).astype(F16)
            delta = (z2.astype(np.float32) * half_scale).astype(F16)
            columns = slice(y_offset, y_offset + weight_b.shape[2])
            result[row, columns] = (result[row, columns].astype(np.float32) + delta.astype(np.float32)).astype(F16)
    return result


def bits(array):
    return array.view(np.uint16)


# --- results ---

def test_adds_into_y_and_never_writes_out(cann):
    data = operands()
    with AddLora(cann, **data) as call:
        y, out = call.run(cann.stream(), layer_idx=1, scale=0.5, y_offset=16)
    np.testing.assert_array_equal(y, expected(**data, layer_idx=1, scale=0.5, y_offset=16))
    assert (out == 7).all()


@pytest.mark.parametrize("value", [0.1, 1e-3, 1e5, -1e5, 1e-9, 65504.0, 65519.0])
def test_scale_goes_double_float_half(cann, value):
    data = operands()
    with AddLora(cann, **data) as call:
        y, _ = call.run(cann.stream(), scale=value)
    np.testing.assert_array_equal(y, expected(**data, scale=value))


def test_each_product_is_rounded_to_half(cann):
    # 2049 is no half: Z1 = 2048 and Z2 = 2048, where unrounded sums would give 2049.
    data = operands(b=1, h1=16, h2=16, h3=16, r=16, w=1, layers=1)
    data["x"][:] = 0
    data["x"][0, :2] = 2048, 1
    data["weight_a"][:] = 0
    data["weight_a"][0, 0, 0, :2] = 1
    data["weight_b"][:] = 0
    data["weight_b"][0, 0, :, 0] = 1
    data["y"][:] = 0
    data["y"][0, 0] = 1
    with AddLora(cann, **data) as call:
        y, _ = call.run(cann.stream())
    assert (y == 2048).all()


def test_half_conversion_is_numpys(cann):
    """Every half goes through y + 0, and scale * Z2 covers results from subnormal to infinite."""
    every = np.arange(65536, dtype=np.uint16).view(F16).reshape(-1, 16)
    data = operands(b=len(every), h1=16, h2=16, h3=16, w=1, layers=1, with_a=False)
    data.update(y=every.copy())
    data["x"][:] = 0
    with AddLora(cann, **data) as call:
        y, _ = call.run(cann.stream())
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y, every + F16(0))


def test_without_weight_a_rank_is_the_second_dimension_of_x(cann):
    data = operands(with_a=False)
    with AddLora(cann, **data) as call:
        y, _ = call.run(cann.stream())
    np.testing.assert_array_equal(y, expected(**data))


def test_without_weight_a_a_wrong_rank_is_not_refused(cann):
    data = operands(with_a=False)
    data["x"] = np.zeros((3, 48), F16)
    with AddLora(cann, **data) as call:
        call.run(cann.stream())


@pytest.mark.parametrize("index", [-1, -5, 4])
def test_negative_and_w_are_skipped(cann, control, index):
    data = operands(indices=[0, index, 1])
    with AddLora(cann, **data) as call:
        y, _ = call.run(cann.stream())
    np.testing.assert_array_equal(bits(y[1]), bits(data["y"][1]))
    np.testing.assert_array_equal(y, expected(**data))
    assert control.misuse() == 0


def test_index_above_w_spoils_memory_without_crashing(cann, control):
    bystander = np.zeros(64, F16)
    address = cann.upload(bystander)
    data = operands(indices=[0, 5, 1])
    with AddLora(cann, **data) as call:
        y, _ = call.run(cann.stream())
    assert control.misuse("index_above_w") == 1
    assert control.guard_violations() == 1
    assert np.isnan(cann.download(address, bystander)).any()
    assert np.isnan(y[0]).all()


@pytest.mark.parametrize("soc, w, overrun", [("Ascend310P3", 32, True), ("Ascend310P3", 31, False), ("Ascend910B2", 32, False)])
def test_310p_overruns_at_index_w_of_32(cann, control, soc, w, overrun):
    control.configure(soc=soc)
    data = operands(w=w, indices=[0, w, 1])
    with AddLora(cann, **data) as call:
        call.run(cann.stream())
    assert control.misuse("index_above_w") == overrun


def test_slice_size_does_not_narrow_what_is_written(cann):
    data = operands()
    with AddLora(cann, **data) as call:
        y, _ = call.run(cann.stream(), y_slice_size=0)
    np.testing.assert_array_equal(y, expected(**data))


def test_empty_batch_succeeds_with_no_workspace(cann, control):
    data = operands(b=0)
    with AddLora(cann, **data) as call:
        size, executor = cann.plan(call.tensors, layer_idx=99)
        assert size == 0
        cann.aclnnAddLora(None, 0, executor, None)
    assert control.live("executor") == 0


def test_nchw_and_nhwc_count_as_nd(cann):
    for tag in (NCHW, NHWC):
        data = operands()
        with AddLora(cann, **data, format=tag) as call:
            y, _ = call.run(cann.stream())
        np.testing.assert_array_equal(y, expected(**data))


# --- versions ---

def test_newer_cann_takes_minus_one_and_checks_the_column_range(cann):
    with AddLora(cann, **operands()) as call:
        cann.plan(call.tensors, y_slice_size=-1)
        assert code_of(cann.plan, call.tensors, y_slice_size=17) == 561002
        assert code_of(cann.plan, call.tensors, y_slice_size=-2) == 561002
        assert code_of(cann.plan, call.tensors, y_offset=48) == 561002
        assert code_of(cann.plan, call.tensors, y_offset=40) == 561002


def test_older_cann_rejects_minus_one_and_writes_past_the_end(cann, control):
    control.configure(version="8.5.0")
    data = operands(b=2, h2=32, h3=48)
    with AddLora(cann, **data) as call:
        assert code_of(cann.plan, call.tensors, y_slice_size=-1) == 561002
        assert code_of(cann.plan, call.tensors, y_offset=49, y_slice_size=0) == 561002
        call.run(cann.stream(), y_offset=48, y_slice_size=0)
    assert control.guard_violations() == 1


# --- codes of the first phase ---

@pytest.mark.parametrize("missing", [0, 1, 2, 3, 5])
def test_null_tensor(cann, missing):
    with AddLora(cann, **operands()) as call:
        tensors = [None if i == missing else each for i, each in enumerate(call.tensors)]
        assert code_of(cann.plan, tensors) == 161001


@pytest.mark.parametrize("size, executor", [(False, True), (True, False)])
def test_null_result_places(cann, size, executor):
    with AddLora(cann, **operands()) as call:
        y, x, b, i, a, out = call.tensors
        places = (ctypes.byref(ctypes.c_uint64()) if size else None, ctypes.byref(ctypes.c_void_p()) if executor else None)
        assert code_of(cann.aclnnAddLoraGetWorkspaceSize, y, x, b, i, a, 0, 1.0, 0, -1, out, *places) == 161001


@pytest.mark.parametrize("name, dtype, code", [
    ("y", np.float32, 161002), ("x", np.float32, 161002), ("weight_b", np.float32, 161002),
    ("indices", np.int64, 161002), ("weight_a", np.float32, 561002)])
def test_wrong_dtype(cann, name, dtype, code):
    data = operands()
    data[name] = data[name].astype(dtype)
    with AddLora(cann, **data) as call:
        assert code_of(cann.plan, call.tensors) == code


def test_wrong_format(cann):
    with AddLora(cann, **operands(), format=FRACTAL_NZ) as call:
        assert code_of(cann.plan, call.tensors) == 161002


@pytest.mark.parametrize("change, scalars", [
    ({"y": np.zeros((3, 4, 12), F16)}, {}),
    ({"x": np.zeros((3, 2, 16), F16)}, {}),
    ({"x": np.zeros((2, 32), F16)}, {}),
    ({"weight_b": np.zeros((4, 2, 256), F16)}, {}),
    ({"weight_b": np.zeros((4, 2, 64, 16), F16)}, {}),
    ({"indices": np.zeros((3, 1), np.int32)}, {}),
    ({"indices": np.zeros(2, np.int32)}, {}),
    ({"weight_a": np.zeros((3, 2, 16, 32), F16)}, {}),
    ({"weight_a": np.zeros((4, 1, 16, 32), F16)}, {}),
    ({"weight_a": np.zeros((4, 2, 32, 32), F16)}, {}),
    ({"weight_a": np.zeros((4, 2, 16, 16), F16)}, {}),
    ({}, {"layer_idx": -1}),
    ({}, {"layer_idx": 2}),
    ({}, {"y_offset": -1}),
])
def test_shapes_that_do_not_agree(cann, change, scalars):
    with AddLora(cann, **{**operands(), **change}) as call:
        assert code_of(cann.plan, call.tensors, **scalars) == 561002


@pytest.mark.parametrize("sizes", [
    {"r": 8}, {"r": 144}, {"w": 33}, {"layers": 33}, {"h1": 24}, {"h2": 24}, {"h3": 40}, {"b": 1, "h3": 131088},
    {"b": 1, "h1": 131088, "w": 1, "layers": 1}])
def test_unsupported_sizes(cann, sizes):
    with AddLora(cann, **operands(**sizes)) as call:
        assert code_of(cann.plan, call.tensors) == 561002


def test_rank_above_128_passes_without_weight_a(cann):
    with AddLora(cann, **operands(r=144, with_a=False)) as call:
        cann.plan(call.tensors)


def test_null_comes_before_dtype_and_dtype_before_shape(cann):
    data = operands()
    data["y"] = data["y"].astype(np.float32)
    data["x"] = np.zeros((2, 31), F16)
    with AddLora(cann, **data) as call:
        assert code_of(cann.plan, [*call.tensors[:5], None]) == 161001
        assert code_of(cann.plan, call.tensors) == 161002


def test_shape_of_out_is_not_checked(cann):
    with AddLora(cann, **operands()) as call:
        small = cann.tensor(call.addresses[5], (1, 1), "float16")
        cann.plan([*call.tensors[:5], small])
        cann.aclDestroyTensor(small)


def test_no_kernel_for_other_socs(cann, control):
    control.configure(soc="Ascend910_9391")
    with AddLora(cann, **operands()) as call:
        assert code_of(cann.plan, call.tensors) == 561003


def test_opp_path_unset(cann, control, monkeypatch):
    control.configure(require_opp_path=True)
    with AddLora(cann, **operands()) as call:
        monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
        assert code_of(cann.plan, call.tensors) == 561107
        monkeypatch.setenv("ASCEND_OPP_PATH", "/nowhere")
        cann.plan(call.tensors)


# --- workspace and executors ---

@pytest.mark.parametrize("b, h1, h2, r", [(1, 16, 4096, 16), (17, 32, 16, 32)])
def test_workspace_formula(cann, b, h1, h2, r):
    c = (b + 15) // 16 * 16
    with AddLora(cann, **operands(b=b, h1=h1, h2=h2, h3=h2, r=r)) as call:
        size, _ = cann.plan(call.tensors)
    assert size == 16777216 + b * h1 * 2 + c * r * 2 + c * h2 * 2 + c * 12 + 1048576
    if (b, h1, h2, r) == (1, 16, 4096, 16):
        assert size == 17957600


def test_workspace_and_executor_of_the_second_phase(cann, control):
    with AddLora(cann, **operands()) as call:
        size, executor = cann.plan(call.tensors)
        assert code_of(cann.aclnnAddLora, None, size, executor, None) == 161001
        assert code_of(cann.aclnnAddLora, None, 0, executor, None) == 161002
        assert code_of(cann.aclnnAddLora, 64, size - 1, executor, None) == 161002
        assert code_of(cann.aclnnAddLora, None, 0, None, None) == 161001
        # None of these spent it.
        workspace = cann.malloc(size)
        cann.aclnnAddLora(workspace, size, executor, None)
        cann.aclrtSynchronizeDevice()
        cann.aclrtFree(workspace)
    assert control.live() == 0 and control.misuse() == 0


def test_workspace_smaller_than_it_was_said_to_be(cann, control):
    stream = cann.stream()
    with AddLora(cann, **operands()) as call:
        size, executor = cann.plan(call.tensors)
        workspace = cann.malloc(size // 2)
        cann.aclnnAddLora(workspace, size, executor, stream)
        assert code_of(cann.aclrtSynchronizeStream, stream) == 507015
    assert control.misuse("out_of_bounds") == 1


def test_executor_is_single_use(cann, control):
    with AddLora(cann, **operands()) as call:
        size, executor = cann.plan(call.tensors)
        workspace = cann.malloc(size)
        cann.aclnnAddLora(workspace, size, executor, None)
        assert control.live("executor") == 0
        assert code_of(cann.aclnnAddLora, workspace, size, executor, None) == 561000
        assert code_of(cann.aclDestroyAclOpExecutor, executor) == 561000
        assert code_of(cann.aclSetAclOpExecutorRepeatable, executor) == 561000
    assert control.misuse("executor_spent") == 3


def test_repeatable_executor_runs_again_and_must_be_destroyed(cann, control):
    data = operands()
    with AddLora(cann, **data) as call:
        size, executor = cann.plan(call.tensors)
        cann.aclSetAclOpExecutorRepeatable(executor)
        workspace = cann.malloc(size)
        for _ in range(2):
            cann.aclnnAddLora(workspace, size, executor, None)
        cann.aclrtSynchronizeDevice()
        once = expected(**data)
        np.testing.assert_array_equal(call.download("y"), expected(**{**data, "y": once}))
        assert control.live("executor") == 1
        cann.aclDestroyAclOpExecutor(executor)
        assert control.live("executor") == 0
        assert code_of(cann.aclDestroyAclOpExecutor, executor) == 561000


def test_repeatable_comes_too_late_after_a_run(cann):
    with AddLora(cann, **operands()) as call:
        size, executor = cann.plan(call.tensors)
        cann.aclSetAclOpExecutorRepeatable(executor)
        cann.aclnnAddLora(cann.malloc(size), size, executor, None)
        assert code_of(cann.aclSetAclOpExecutorRepeatable, executor) == 561000


def test_executor_that_never_ran_is_destroyed(cann, control):
    with AddLora(cann, **operands()) as call:
        _, executor = cann.plan(call.tensors)
        assert control.live("executor") == 1
        cann.aclDestroyAclOpExecutor(executor)
    assert control.live() == 0


def test_tensor_address_can_be_replaced(cann):
    data = operands()
    with AddLora(cann, **data) as call:
        size, executor = cann.plan(call.tensors)
        cann.aclSetAclOpExecutorRepeatable(executor)
        other = cann.upload(np.zeros_like(data["y"]))
        cann.aclSetTensorAddr(executor, 0, call.tensors[0], other)
        cann.aclnnAddLora(cann.malloc(size), size, executor, None)
        cann.aclrtSynchronizeDevice()
        np.testing.assert_array_equal(cann.download(other, data["y"]), expected(**{**data, "y": 0 * data["y"]}))
        np.testing.assert_array_equal(call.download("y"), data["y"])


def test_tensors_may_go_after_the_second_phase_but_not_before(cann, control):
    stream = cann.stream()
    for early in (False, True):
        call = AddLora(cann, **operands())
        size, executor = cann.plan(call.tensors)
        workspace = cann.malloc(size)
        destroy = lambda: [cann.aclDestroyTensor(each) for each in call.tensors]
        if early:
            destroy()
            assert code_of(cann.aclnnAddLora, workspace, size, executor, stream) == 561000
        else:
            cann.aclnnAddLora(workspace, size, executor, stream)
            destroy()
            cann.aclrtSynchronizeStream(stream)
            np.testing.assert_array_equal(call.download("y"), expected(**operands()))
    assert control.misuse("tensor_destroyed_before_run") == 1


def test_strided_input_fails_in_the_second_phase(cann):
    data = operands()
    with AddLora(cann, **data) as call:
        wide = cann.upload(np.zeros((3, 64), F16))
        x = cann.tensor(wide, (3, 32), "float16", strides=(64, 1))
        size, executor = cann.plan([call.tensors[0], x, *call.tensors[2:]])
        assert code_of(cann.aclnnAddLora, cann.malloc(size), size, executor, None) == 561000


def test_unaligned_data_fails_on_the_device(cann, control):
    stream = cann.stream()
    data = operands()
    with AddLora(cann, **data) as call:
        wide = cann.upload(np.zeros(4 * data["x"].nbytes, np.int8))
        x = cann.tensor(wide + 2, data["x"].shape, "float16")
        size, executor = cann.plan([call.tensors[0], x, *call.tensors[2:]])
        cann.aclnnAddLora(cann.malloc(size), size, executor, stream)
        assert code_of(cann.aclrtSynchronizeStream, stream) == 507015
        np.testing.assert_array_equal(call.download("y"), data["y"])
    assert control.misuse("tensor_unaligned") == 1


def test_host_memory_given_as_device_memory(cann, control):
    data = operands()
    stream = cann.stream()
    with AddLora(cann, **data) as call:
        x = cann.tensor(data["x"].ctypes.data, data["x"].shape, "float16")
        size, executor = cann.plan([call.tensors[0], x, *call.tensors[2:]])
        cann.aclnnAddLora(cann.malloc(size), size, executor, stream)
        assert code_of(cann.aclrtSynchronizeStream, stream) == 507015
    assert control.misuse("not_device_memory") == 1


# --- streams ---

def start(call, cann, stream):
    size, executor = cann.plan(call.tensors)
    workspace = cann.malloc(size)
    cann.aclnnAddLora(workspace, size, executor, stream)
    return workspace


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_work_runs_later(cann, control, mode):
    control.configure(stream_mode=mode, stream_delay_us=100_000)
    data = operands()
    stream = cann.stream()
    with AddLora(cann, **data) as call:
        start(call, cann, stream)
        np.testing.assert_array_equal(call.download("y"), data["y"])
        cann.aclrtSynchronizeStream(stream)
        np.testing.assert_array_equal(call.download("y"), expected(**data))
        cann.aclrtDestroyStream(stream)


def test_work_runs_at_once_in_mode_now(cann, control):
    control.configure(stream_mode="now")
    data = operands()
    with AddLora(cann, **data) as call:
        start(call, cann, cann.stream())
        np.testing.assert_array_equal(call.download("y"), expected(**data))


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_copies_go_on_the_stream_in_order(cann, control, mode):
    control.configure(stream_mode=mode, stream_delay_us=20_000)
    source, target = np.arange(16, dtype=F16), np.zeros(16, F16)
    stream, address = cann.stream(), cann.malloc(32)
    cann.aclrtMemcpyAsync(address, 32, source.ctypes.data, 32, HOST_TO_DEVICE, stream)
    cann.aclrtMemcpyAsync(target.ctypes.data, 32, address, 32, DEVICE_TO_HOST, stream)
    assert (target == 0).all()
    cann.aclrtSynchronizeStream(stream)
    np.testing.assert_array_equal(target, source)
    cann.aclrtDestroyStream(stream)


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_memory_freed_too_early_gives_garbage_and_is_counted(cann, control, mode):
    control.configure(stream_mode=mode, stream_delay_us=50_000)
    stream = cann.stream()
    with AddLora(cann, **operands()) as call:
        size, executor = cann.plan(call.tensors)
        workspace = cann.malloc(size)
        cann.aclnnAddLora(workspace, size, executor, stream)
        cann.aclrtFree(call.addresses[2])
        call.addresses[2] = None
        cann.aclrtSynchronizeStream(stream)
        assert np.isnan(call.download("y")).any()
        cann.aclrtFree(workspace)
        cann.aclrtDestroyStream(stream)
    assert control.misuse("use_after_free") == 1
    assert control.live() == 0


def test_host_memory_gone_before_the_stream_ran(cann, control):
    import mmap
    count = 1 << 16
    block = mmap.mmap(-1, count)
    source = ctypes.addressof(ctypes.c_char.from_buffer(block))
    stream = cann.stream()
    cann.aclrtMemcpyAsync(cann.malloc(count), count, source, count, HOST_TO_DEVICE, stream)
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.munmap(source, count)
    assert code_of(cann.aclrtSynchronizeStream, stream) == 107000
    assert control.misuse("host_memory_gone") == 1
    # The module must not unmap it a second time.
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap(source, count, 3, 0x32, -1, 0)


def test_stream_destroyed_with_work(cann, control):
    stream = cann.stream()
    with AddLora(cann, **operands()) as call:
        start(call, cann, stream)
        cann.aclrtDestroyStream(stream)
    assert control.misuse("stream_destroyed_with_work") == 1
    assert code_of(cann.aclrtSynchronizeStream, stream) == 107000


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_an_event_orders_two_streams(cann, control, mode):
    control.configure(stream_mode=mode, stream_delay_us=20_000)
    first, second, event = cann.stream(), cann.stream(), ctypes.c_void_p()
    cann.aclrtCreateEvent(ctypes.byref(event))
    source, target, address = np.arange(16, dtype=F16), np.zeros(16, F16), cann.malloc(32)
    cann.aclrtMemcpyAsync(address, 32, source.ctypes.data, 32, HOST_TO_DEVICE, first)
    cann.aclrtRecordEvent(event, first)
    cann.aclrtStreamWaitEvent(second, event)
    cann.aclrtMemcpyAsync(target.ctypes.data, 32, address, 32, DEVICE_TO_HOST, second)
    cann.aclrtSynchronizeStream(second)
    np.testing.assert_array_equal(target, source)
    cann.aclrtDestroyEvent(event)
    for stream in (first, second):
        cann.aclrtDestroyStream(stream)


# --- initialisation, devices, memory ---

def test_init_twice_and_use_before_init(control, emulated_cann_build):
    cann = Cann(emulated_cann_build / "layouts/newer/lib64")
    tensor = cann.tensor(None, (16,), "float16")
    assert code_of(cann.aclFinalize) == 100001
    assert code_of(cann.malloc, 16) == 107002
    assert code_of(cann.stream) == 107002
    # The runtime alone works before aclInit, operators do not.
    cann.aclrtSetDevice(0)
    cann.aclrtFree(cann.malloc(16))
    assert code_of(cann.plan, [tensor] * 6) == 361001
    cann.aclInit(None)
    assert code_of(cann.aclInit, None) == 100002
    assert code_of(cann.plan, [tensor] * 6) == 161002
    cann.aclrtResetDevice(0)
    assert code_of(cann.malloc, 16) == 107002
    assert code_of(cann.plan, [tensor] * 6) == 361001


def test_a_device_is_reset_as_often_as_it_was_set(cann):
    cann.aclrtSetDevice(0)
    cann.aclrtResetDevice(0)
    cann.aclrtFree(cann.malloc(16))
    cann.aclrtResetDevice(0)
    assert code_of(cann.malloc, 16) == 107002
    assert code_of(cann.aclrtResetDevice, 0) == 107002


def test_a_thread_has_no_context_until_it_sets_a_device(cann):
    codes = []

    def work():
        codes.append(code_of(cann.malloc, 16))
        cann.aclrtSetDevice(0)
        cann.aclrtFree(cann.malloc(16))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [107002]


def test_devices_and_soc(cann, control):
    count = ctypes.c_uint32()
    cann.aclrtGetDeviceCount(ctypes.byref(count))
    assert count.value == 1 and cann.aclrtGetSocName() == b"Ascend910B2"
    assert code_of(cann.aclrtSetDevice, 1) == 107001
    control.configure(device_count=2, soc="Ascend310P3")
    cann.aclrtSetDevice(1)
    assert cann.aclrtGetSocName() == b"Ascend310P3"


def test_memory_is_aligned_poisoned_and_limited(cann, control):
    address = cann.malloc(100)
    assert address % 32 == 0
    assert np.isnan(cann.download(address, np.zeros(50, F16))).all()
    control.configure(device_memory=1000)
    assert code_of(cann.malloc, 1000) == 207001
    assert code_of(cann.malloc, 0) == 100000
    cann.aclrtFree(address)
    assert control.live_bytes() == 0
    assert code_of(cann.aclrtFree, address) == 107000
    assert control.misuse("double_free") == 1


def test_guard_zones(cann, control):
    address = cann.malloc(100)
    ctypes.memset(address + 100, 1, 1)
    assert control.guard_violations() == 1
    other = cann.malloc(100)
    ctypes.memset(other - 1, 1, 1)
    cann.aclrtFree(other)
    assert control.guard_violations() == 2


def test_copies_check_their_arguments(cann, control):
    host, address = np.zeros(16, F16), cann.malloc(32)
    here = host.ctypes.data
    assert code_of(cann.aclrtMemcpy, address, 16, here, 32, HOST_TO_DEVICE) == 107000
    assert code_of(cann.aclrtMemcpy, None, 32, here, 32, HOST_TO_DEVICE) == 100000
    assert code_of(cann.aclrtMemcpy, address, 32, here, 32, DEVICE_TO_HOST) == 107000
    assert code_of(cann.aclrtMemcpy, here, 32, address, 32, HOST_TO_DEVICE) == 107000
    assert code_of(cann.aclrtMemcpy, here, 32, address, 32, DEVICE_TO_DEVICE) == 107000
    assert code_of(cann.aclrtMemcpy, address, 32, here, 32, 9) == 107000
    assert control.misuse("not_device_memory") > 0 and control.misuse("device_memory_as_host") > 0


# --- failures on demand, counts, libraries ---

FAILING = ["aclrtMalloc", "aclrtMemcpy", "aclnnAddLoraGetWorkspaceSize", "aclnnAddLora", "aclrtSynchronizeStream"]


@pytest.mark.parametrize("function", FAILING)
def test_a_failure_on_demand_has_its_code_and_text_once(cann, control, function):
    data = operands()
    stream = cann.stream()
    control.fail(function, 500123, "broken on purpose")
    with pytest.raises(CannError) as caught:
        AddLora(cann, **data).run(stream)
    assert (caught.value.function, caught.value.code) == (function, 500123)
    assert "broken on purpose" in caught.value.text
    AddLora(cann, **data).run(stream)


def test_the_nth_call_fails_and_a_failure_may_have_no_text(cann, control):
    control.fail("aclrtMalloc", 207001, nth=3)
    cann.malloc(16)
    cann.malloc(16)
    with pytest.raises(CannError) as caught:
        cann.malloc(16)
    assert caught.value.text is None
    cann.malloc(16)
    control.fail("aclrtMalloc", 207001)
    control.clear_failures()
    cann.malloc(16)


def test_a_failing_constructor_returns_null(cann, control):
    control.fail("aclCreateTensor", 1, "no tensor")
    assert cann.tensor(None, (16,), "float16") is None
    assert b"no tensor" in cann.aclGetRecentErrMsg()
    assert cann.aclGetRecentErrMsg() is None


def test_a_failure_on_the_device_shows_at_synchronising(cann, control):
    stream = cann.stream()
    data = operands()
    control.fail("aclnnAddLora.kernel", 507015, "core hung")
    with AddLora(cann, **data) as call:
        with pytest.raises(CannError) as caught:
            call.run(stream)
        assert caught.value.function == "aclrtSynchronizeStream" and "core hung" in caught.value.text
        np.testing.assert_array_equal(call.download("y"), data["y"])
        cann.aclrtSynchronizeStream(stream)


def test_a_failing_release_still_releases(cann, control):
    address = cann.malloc(16)
    control.fail("aclrtFree", 500000, "reported only")
    assert code_of(cann.aclrtFree, address) == 500000
    assert control.live() == 0


def test_an_executor_whose_second_phase_failed_may_be_destroyed_or_not(cann, control):
    with AddLora(cann, **operands()) as call:
        size, executor = cann.plan(call.tensors)
        cann.aclDestroyTensor(call.tensors.pop())
        assert code_of(cann.aclnnAddLora, cann.malloc(size), size, executor, None) == 561000
        assert control.live("executor") == 0
        cann.aclDestroyAclOpExecutor(executor)


def test_counts(cann, control):
    before = control.calls("aclrtMalloc")
    stream = cann.stream()
    with AddLora(cann, **operands()) as call:
        assert control.live("tensor") == 6 and control.live("device_memory") == 6 and control.live("stream") == 1
        assert control.live_bytes() > 0 and control.live() == 13
        call.run(stream)
    cann.aclrtDestroyStream(stream)
    assert control.calls("aclrtMalloc") == before + 7
    assert control.live() == 0 and control.live("context") == 1 and control.misuse() == 0
    assert control.report()["calls"]["aclnnAddLora"] == 1


def test_stale_handles_are_counted(cann, control):
    tensor = cann.tensor(None, (16,), "float16")
    cann.aclDestroyTensor(tensor)
    assert code_of(cann.aclDestroyTensor, tensor) == 161002
    assert control.misuse("handle_unknown") == 1 and len(control.misuse_log()) == 1


@pytest.mark.parametrize("layout, operator", [
    ("newer", "libopapi_math.so"), ("older", "libopapi.so"), ("split", "libopapi_math.so")])
def test_layouts_say_which_library_answered(control, emulated_cann_build, layout, operator):
    folder = emulated_cann_build / "layouts" / layout / "lib64"
    cann = Cann(folder)
    cann.start()
    with AddLora(cann, **operands()) as call:
        call.run(cann.stream())
    assert control.last_library("aclnnAddLora") == str(folder / operator)
    runtime = "libacl_rt.so" if layout == "split" else "libascendcl.so"
    assert control.last_library("aclInit") == str(folder / runtime)
    assert control.library_calls(operator) == 2


def test_libraries_export_only_their_own_part(emulated_cann_build):
    has = lambda path, name: hasattr(ctypes.CDLL(str(emulated_cann_build / "layouts" / path)), name)
    assert not has("newer/lib64/libopapi.so", "aclnnAddLora")
    assert not has("newer/lib64/libascendcl.so", "aclCreateTensor")
    assert not has("newer/lib64/libnnopbase.so", "aclInit")
    assert not has("split/lib64/libascendcl.so", "aclInit")
    assert not has("without_operator/lib64/libopapi.so", "aclnnAddLora")
    assert not has("custom/other/op_api/lib/libcust_opapi.so", "aclnnAddLora")


def test_custom_packages_answer_under_their_own_path(control, emulated_cann_build):
    for name in ("first", "second"):
        operator = emulated_cann_build / f"layouts/custom/{name}/op_api/lib/libcust_opapi.so"
        cann = Cann(emulated_cann_build / "layouts/newer/lib64", operator)
        assert code_of(cann.plan, [None] * 6) == 361001
        assert control.last_library("aclnnAddLoraGetWorkspaceSize") == str(operator)


def test_environment_presets(emulated_cann_build, tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from cann_client import Cann, CannError\n"
        "cann = Cann(sys.argv[2]); cann.start(); print(cann.aclrtGetSocName().decode()); cann.malloc(16)\n"
        "try: cann.malloc(16)\n"
        "except CannError as error: print(error.code, error.text)\n")
    report = tmp_path / "report.json"
    environment = {**os.environ, "EMU_SOC": "Ascend310P3", "EMU_FAIL": "aclrtMalloc:2:207001:all gone",
                   "EMU_REPORT": str(report)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(emulated_cann.SOURCE), str(emulated_cann_build / "layouts/newer/lib64")],
        capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines() == ["Ascend310P3", "207001 E207001: all gone"]
    assert '"device_memory": 1' in report.read_text()
