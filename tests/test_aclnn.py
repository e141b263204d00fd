"""raw with backend="aclnn", on the emulated CANN: each scenario in a process of its own, as a library search is made once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import emulated_cann
import pytest

HERE = Path(__file__).resolve().parent

PROLOGUE = f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE / "emulated_cann")!r}]
import os
import numpy as np
import emulated_cann
from mindspore_addlora import raw

def control():
    return emulated_cann.Control(os.environ["EMU_BUILD"])

rng = np.random.default_rng(5)

def problem(b=9, h1=64, h2=32, h3=80, r=16, w=4, layers=3):
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float16)
    indices = (np.arange(b) % (w + 2) - 1).astype(np.int32)  # -1, every slot, W
    return dict(y=draw(b, h3), x=draw(b, h1), weight_b=draw(w, layers, h2, r), indices=indices,
                weight_a=draw(w, layers, r, h1) / np.float16(8))

def near(result, expected):
    # float32 sums in another order may fall to the other side of a rounding boundary of Z1, Z2 or d.
    unit = np.spacing(np.abs(expected).astype(np.float16)).astype(np.float64)
    scale = np.abs(expected.astype(np.float64)).max()
    assert (np.abs(result.astype(np.float64) - expected.astype(np.float64)) <= 2 * unit + 2**-9 * scale).all()
    assert np.mean(result == expected) > 0.9
"""


@pytest.fixture
def run(emulated_cann_build, tmp_path):
    def run_script(script, layout="newer", **environment):
        settings = (
            {} if layout is None else emulated_cann.toolkit_environment(emulated_cann_build, layout)
        )
        done = subprocess.run(
            [sys.executable, "-c", PROLOGUE + script],
            env=os.environ | settings | {"EMU_BUILD": str(emulated_cann_build)} | environment,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_script


@pytest.mark.parametrize("stream_mode", ["sync", "thread", "now"])
@pytest.mark.parametrize("layout", ["newer", "older", "split"])
def test_the_result_is_the_device_s_and_nothing_leaks(run, layout, stream_mode):
    run(
        """
arguments = problem()
options = dict(layer_idx=2, scale=0.5, y_offset=16)
before = {name: value.copy() for name, value in arguments.items()}
out = raw.add_lora(**arguments, **options, backend="aclnn")
near(out, raw.add_lora(**arguments, **options, rounding="device"))
none = (arguments["indices"] < 0) | (arguments["indices"] >= 4)
assert none.sum() == 3 and out[none].tobytes() == arguments["y"][none].tobytes()
for name, value in before.items():
    assert value.tobytes() == arguments[name].tobytes(), name
in_place = arguments["y"].copy()
again = raw.add_lora(in_place, *[arguments[n] for n in ("x", "weight_b", "indices", "weight_a")],
                     **options, out=in_place, backend="aclnn")
assert again is in_place and again.tobytes() == out.tobytes()
assert control().live() == 0, control().report()
assert control().misuse() == 0 and control().guard_violations() == 0, control().misuse_log()
""",
        layout,
        EMU_STREAM_MODE=stream_mode,
    )


def test_old_cann_refuses_minus_one_so_it_is_resolved(run):
    run(
        """
arguments = problem()
near(raw.add_lora(**arguments, backend="aclnn"), raw.add_lora(**arguments, rounding="device"))
""",
        "older",
        EMU_CANN_VERSION="8.5.0",
    )


def test_without_weight_a_and_strided_inputs(run):
    run(
        """
arguments = problem()
arguments["x"] = np.asfortranarray(arguments["x"])[:, ::4]
arguments["y"] = np.repeat(arguments["y"], 2, axis=1)[:, ::2]
arguments["weight_a"] = None
assert not arguments["x"].flags.c_contiguous and not arguments["y"].flags.c_contiguous
near(raw.add_lora(**arguments, backend="aclnn"), raw.add_lora(**arguments, rounding="device"))
arguments = problem()
arguments["weight_b"] = np.ascontiguousarray(arguments["weight_b"].swapaxes(2, 3)).swapaxes(2, 3)
arguments["weight_a"] = arguments["weight_a"][::-1]
arguments["indices"] = np.repeat(arguments["indices"], 2)[::2]
near(raw.add_lora(**arguments, backend="aclnn"), raw.add_lora(**arguments, rounding="device"))
""",
    )


def test_rules_and_indices_are_checked_before_cann_sees_the_call(run):
    run(
        """
def refused(code, words, **replaced):
    arguments = problem() | replaced
    calls = control().calls("aclnnAddLoraGetWorkspaceSize")
    try:
        raw.add_lora(**arguments, backend="aclnn")
    except raw.AddLoraError as error:
        assert error.code == code, error
        for word in words:
            assert word in str(error), error
    else:
        raise AssertionError("accepted")
    assert control().calls("aclnnAddLoraGetWorkspaceSize") == calls
    assert control().live() == 0

refused(561002, ["indices", "W = 4", "5 in row 3"], indices=np.array([0, 1, 2, 5, 0, 0, 0, 0, 0], np.int32))
refused(561002, ["layer_idx", "got 3"], layer_idx=3)
refused(161002, ["limits", "aclnn", "none"], limits="none")
refused(161002, ["y", "float16", "float32"], y=np.zeros((9, 80), np.float32))
big = np.broadcast_to(np.float16(0), (32, 32, 131072, 128))
refused(561002, ["weight_b", "2^32"], weight_b=big, y=np.zeros((9, 131072), np.float16),
        weight_a=np.broadcast_to(np.float16(0), (32, 32, 128, 64)))
assert raw.add_lora(**{k: v[:0] if k in "yxindices" else v for k, v in problem().items()}, backend="aclnn").shape == (0, 80)
""",
    )


def test_two_phases(run):
    run(
        """
arguments = problem()
out = np.empty_like(arguments["y"])
ordered = [arguments[n] for n in ("y", "x", "weight_b", "indices", "weight_a")]
size, executor = raw.add_lora_get_workspace_size(*ordered, 1, 2.0, 48, 32, out, backend="aclnn")
b, h1, h2, r, c = 9, 64, 32, 16, 16
assert size == 16777216 + b * h1 * 2 + c * r * 2 + c * h2 * 2 + c * 12 + 1048576
executor.set_repeatable()
for _ in range(3):
    arguments["x"][:] = rng.standard_normal(arguments["x"].shape)
    arguments["indices"][:] = np.roll(arguments["indices"], 1)
    raw.add_lora_execute(None, executor)
    near(out, raw.add_lora(**arguments, layer_idx=1, scale=2.0, y_offset=48, rounding="device"))
arguments["indices"][2] = 5
kept = out.copy()
try:
    raw.add_lora_execute(None, executor)
    raise AssertionError("accepted")
except raw.AddLoraError as error:
    assert error.code == 561002
assert out.tobytes() == kept.tobytes()
assert control().live() > 0
del executor
assert control().live() == 0
size, executor = raw.add_lora_get_workspace_size(*ordered[:3], arguments["indices"] * 0, ordered[4], 0, 1.0, 0, -1, out, backend="aclnn")
raw.add_lora_execute(None, executor)
try:
    raw.add_lora_execute(None, executor)
    raise AssertionError("ran twice")
except raw.AddLoraError as error:
    assert error.code == 161002 and "spent" in str(error)
""",
    )


FAILURES = [
    "aclInit",
    "aclnnInit",
    "aclrtSetDevice",
    "aclrtMalloc",
    "aclrtMemcpy",
    "aclrtCreateStream",
    "aclrtSynchronizeStream",
    "aclnnAddLoraGetWorkspaceSize",
    "aclSetAclOpExecutorRepeatable",
    "aclnnAddLora",
    "aclnnAddLora.kernel",
]


@pytest.mark.parametrize("function", FAILURES)
def test_a_failure_of_cann_has_its_code_and_text_and_leaks_nothing(run, function):
    run(
        f"""
arguments = problem()
out = np.full_like(arguments["y"], 7)
control().fail({function!r}, 507015, "the reason of this test")
try:
    raw.add_lora(**arguments, out=out, backend="aclnn")
    raise AssertionError("no failure")
except raw.AclError as error:
    assert error.code == 507015, error
    assert "the reason of this test" in str(error), error
assert (out == 7).all()
assert control().live() == 0, control().report()
near(raw.add_lora(**arguments, out=out, backend="aclnn"), raw.add_lora(**arguments, rounding="device"))
assert control().live() == 0 and control().misuse() == 0, control().report()
""",
    )


def test_every_allocation_and_copy_may_fail(run):
    run(
        """
arguments = problem()
for function in ("aclrtMalloc", "aclrtMemcpy", "aclCreateTensor"):
    for nth in range(1, 6):
        control().clear_failures()
        control().fail(function, 207001, "out of device memory", nth=nth)
        try:
            raw.add_lora(**arguments, backend="aclnn")
            raise AssertionError(f"{function} {nth}: no failure")
        except raw.AclError as error:
            assert function in str(error) and "out of device memory" in str(error), error
        assert control().live() == 0, (function, nth, control().report())
""",
    )


def test_somebody_else_has_initialised_cann(run):
    run(
        """
import ctypes
runtime = ctypes.CDLL(os.environ["ASCEND_HOME_PATH"] + "/lib64/libascendcl.so")
assert runtime.aclInit(None) == 0
arguments = problem()
near(raw.add_lora(**arguments, backend="aclnn"), raw.add_lora(**arguments, rounding="device"))
""",
    )


def test_two_threads(run):
    run(
        """
import threading
problems = [problem() for _ in range(2)]
expected = [raw.add_lora(**p, rounding="device") for p in problems]
errors = []
def work(i):
    try:
        for _ in range(10):
            near(raw.add_lora(**problems[i], backend="aclnn"), expected[i])
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not errors, errors
assert control().live() == 0 and control().misuse() == 0, control().misuse_log()
""",
        EMU_STREAM_MODE="thread",
    )


def test_where_the_operator_is_looked_for(run, emulated_cann_build, tmp_path):
    custom = emulated_cann_build / "layouts" / "custom"
    report = (
        "raw.add_lora(**problem(), backend='aclnn'); print(control().last_library('aclnnAddLora'))"
    )
    home = str(emulated_cann_build / "layouts" / "newer")
    assert "newer" in run(report) and "libopapi_math.so" in run(report)
    assert "older" in run(report, "older") and "libopapi.so" in run(report, "older")

    first, second = (str(custom / name) for name in ("first", "second"))
    assert "first" in run(report, ASCEND_CUSTOM_OPP_PATH=f"{first}:{second}")
    assert "second" in run(report, ASCEND_CUSTOM_OPP_PATH=f"{tmp_path}/nothing:{second}:{first}")

    opp = tmp_path / "opp"
    for name in ("first", "second"):
        shutil.copytree(custom / name, opp / "vendors" / name)
    (opp / "vendors" / "config.ini").write_text("load_priority=second,first\n")
    assert "vendors/second" in run(report, ASCEND_OPP_PATH=str(opp))
    assert "layouts/custom/first" in run(
        report, ASCEND_OPP_PATH=str(opp), ASCEND_CUSTOM_OPP_PATH=first
    )
    assert home in run("print(raw.backends()['aclnn'].detail)")

    # The name of an installed package decides, not how its line is written.
    for text in (
        "load_priority=second\r\n",
        "load_priority = second , first\n",
        " load_priority=nothing, second\n",
        "# load_priority=first\n\nload_priority=second",
    ):
        (opp / "vendors" / "config.ini").write_text(text, encoding="utf-8", newline="")
        assert "vendors/second" in run(report, ASCEND_OPP_PATH=str(opp)), repr(text)
    (opp / "vendors" / "config.ini").write_text("load_priority=nothing\n")
    assert "newer" in run(report, ASCEND_OPP_PATH=str(opp))


def test_what_is_in_the_way_is_passed_over(run, emulated_cann_build, tmp_path):
    report = (
        "raw.add_lora(**problem(), backend='aclnn'); print(control().last_library('aclnnAddLora'))"
    )
    library = "op_api/lib/libcust_opapi.so"
    (tmp_path / "a folder" / library).mkdir(parents=True)
    for name, text in (("empty", ""), ("text", "no library")):
        (tmp_path / name / library).parent.mkdir(parents=True)
        (tmp_path / name / library).write_text(text)
    other = emulated_cann_build / "layouts" / "custom" / "other"
    folders = [str(tmp_path / name) for name in ("a folder", "empty", "text")] + [
        str(other),
        "",
        " ",
    ]
    assert "newer" in run(report, ASCEND_CUSTOM_OPP_PATH=":".join(folders))


@pytest.mark.parametrize(("home", "elsewhere"), [("older", "newer"), ("split", "newer")])
def test_an_installation_is_not_mixed_with_what_the_loader_finds(
    run, emulated_cann_build, home, elsewhere
):
    layouts = emulated_cann_build / "layouts"
    detail = run(
        "print(raw.backends()['aclnn'].detail)",
        home,
        LD_LIBRARY_PATH=str(layouts / elsewhere / "lib64"),
    )
    assert detail.count(f"layouts/{home}/lib64/") == 3, detail


def test_half_an_installation_says_what_is_missing(run):
    out = run(
        """
info = raw.backends()["aclnn"]
assert not info.available
print(info.reason)
try:
    raw.add_lora(**problem(), backend="aclnn")
    raise AssertionError("ran")
except ValueError as error:
    assert info.reason in str(error)
""",
        "without_operator",
    )
    assert "aclnnAddLora not found" in out
    assert "runtime not found" not in out


def test_an_unsupported_soc_is_named(run):
    out = run("print(raw.backends()['aclnn'])", EMU_SOC="Ascend910_9391")
    assert "available=False" in out
    assert "Ascend910_9391" in out


@pytest.mark.parametrize("soc", ["Ascend910B2", "Ascend310P3"])
def test_supported_socs(run, soc):
    assert "available=True" in run("print(raw.backends()['aclnn'])", EMU_SOC=soc)


def test_without_cann_it_explains_itself_and_nothing_else_changes(run):
    out = run(
        """
assert not raw.backends()["aclnn"].available
print(raw.backends()["aclnn"].reason)
arguments = problem()
assert raw.add_lora(**arguments).shape == (9, 80)
""",
        None,
        LD_LIBRARY_PATH="",
    )
    for word in ("CANN's runtime not found", "libnnopbase.so not found", "aclnnAddLora not found"):
        assert word in out


ON_DEVICE = """
import ctypes
from pathlib import Path
import cann_client
cann = cann_client.Cann(Path(os.environ["ASCEND_HOME_PATH"]) / "lib64")
try:
    cann.start()
except cann_client.CannError as error:
    assert error.code == 100002
    cann.aclrtSetDevice(0)

def on_device(array):
    return raw.device_tensor(cann.upload(array), array.shape, array.dtype)

def place(arguments):
    return {name: None if array is None else on_device(array) for name, array in arguments.items()}

def read(tensor, like):
    return cann.download(tensor.pointer, like)
"""


@pytest.mark.parametrize("stream_mode", ["sync", "thread", "now"])
def test_tensors_on_the_device_are_not_copied(run, stream_mode):
    run(
        ON_DEVICE
        + """
arguments = problem()
options = dict(layer_idx=2, scale=0.5, y_offset=16)
expected = raw.add_lora(**arguments, **options, rounding="device")
placed = place(arguments)
out = on_device(np.full_like(arguments["y"], 7))
allocated = control().live()
uploads = control().calls("aclrtMemcpy")
assert raw.add_lora(**placed, **options, out=out) is out
# The indices, there and back; nothing else passes the host.
assert control().calls("aclrtMemcpy") == uploads + 2
near(read(out, expected), expected)
none = (arguments["indices"] < 0) | (arguments["indices"] >= 4)
assert read(out, expected)[none].tobytes() == arguments["y"][none].tobytes()
for name, array in arguments.items():
    assert read(placed[name], array).tobytes() == array.tobytes(), name
assert raw.add_lora(**placed, **options, out=placed["y"], backend="aclnn") is placed["y"]
assert read(placed["y"], expected).tobytes() == read(out, expected).tobytes()
arguments["weight_a"], arguments["x"] = None, arguments["x"][:, :16].copy()
placed = place(arguments)
raw.add_lora(**placed, out=out)
near(read(out, expected), raw.add_lora(**arguments, rounding="device"))
assert control().live() == allocated + 4, control().report()  # what place() made
assert control().misuse() == 0 and control().guard_violations() == 0, control().misuse_log()
""",
        EMU_STREAM_MODE=stream_mode,
    )


def test_two_phases_on_a_stream_of_the_caller_s(run):
    run(
        ON_DEVICE
        + """
arguments = problem()
placed = place(arguments)
out = on_device(np.full_like(arguments["y"], 7))
ordered = [placed[n] for n in ("y", "x", "weight_b", "indices", "weight_a")]
size, executor = raw.add_lora_get_workspace_size(*ordered, 1, 2.0, 48, 32, out)
executor.set_repeatable()
expected = raw.add_lora(**arguments, layer_idx=1, scale=2.0, y_offset=48, rounding="device")
workspace = raw.device_tensor(cann.malloc(size), [size], "uint8")
stream = cann.stream()

def refused(code, words, *call):
    try:
        raw.add_lora_execute(*call)
        raise AssertionError("accepted")
    except raw.AddLoraError as error:
        assert error.code == code and words in str(error), error

refused(161001, "workspace", None, executor, stream.value)
small = raw.device_tensor(workspace.pointer, [size - 1], "uint8")
refused(161002, f"at least {size} bytes, got {size - 1}", small, executor, stream.value)
refused(161002, "overlaps", raw.device_tensor(placed["y"].pointer, [size], "uint8"), executor, stream.value)
try:
    raw.add_lora_execute(bytearray(size), executor, stream.value)
    raise AssertionError("accepted")
except TypeError as error:
    assert "device_tensor" in str(error)

for _ in range(2):
    before = control().calls("aclnnAddLora.kernel")
    raw.add_lora_execute(workspace, executor, stream.value)
    assert control().calls("aclnnAddLora.kernel") == before, "the work was to be begun only"
    cann.aclrtSynchronizeStream(stream)
    near(read(out, expected), expected)
raw.add_lora_execute(workspace, executor)  # without a stream it is done
near(read(out, expected), expected)

# Indices that the stream has yet to compute.
late = np.roll(arguments["indices"], 3)
source = cann.upload(late)
cann.aclrtMemcpyAsync(placed["indices"].pointer, late.nbytes, source, late.nbytes, 3, stream)
raw.add_lora_execute(workspace, executor, stream.value)
cann.aclrtSynchronizeStream(stream)
arguments["indices"] = late
near(read(out, expected), raw.add_lora(**arguments, layer_idx=1, scale=2.0, y_offset=48, rounding="device"))

kept = read(out, expected)
late[4] = 5
cann.aclrtMemcpy(placed["indices"].pointer, late.nbytes, late.ctypes.data, late.nbytes, 1)
refused(561002, "got 5 in row 4", workspace, executor, stream.value)
assert read(out, expected).tobytes() == kept.tobytes()
assert control().misuse() == 0, control().misuse_log()
""",
        EMU_STREAM_MODE="sync",
    )


def test_what_is_wrong_with_tensors_on_the_device(run):
    run(
        ON_DEVICE
        + """
arguments = problem()
placed = place(arguments)
out = on_device(np.full_like(arguments["y"], 7))
before = control().calls("aclnnAddLoraGetWorkspaceSize")

def refused(kind, words, **replaced):
    try:
        raw.add_lora(**(placed | {"out": out} | replaced))
    except kind as error:
        for word in words:
            assert word in str(error), error
    else:
        raise AssertionError("accepted")

refused(TypeError, ["x", "device_tensor", "ndarray"], x=arguments["x"])
refused(TypeError, ["out", "device_tensor", "ndarray"], out=arguments["y"])
refused(raw.AddLoraError, ["out", "device_tensor"], out=None)
refused(ValueError, ["backend", "aclnn", "cpu"], backend="cpu")
refused(raw.AddLoraError, ["layer_idx", "got 3"], layer_idx=3)
refused(raw.AddLoraError, ["x", "float16", "float32"],
        x=raw.device_tensor(placed["x"].pointer, [9, 64], "float32"))
refused(raw.AddLoraError, ["indices", "int64"],
        indices=raw.device_tensor(placed["indices"].pointer, [9], "int64"))
refused(raw.AddLoraError, ["out", "overlaps x"],
        out=raw.device_tensor(placed["x"].pointer, [9, 80], "float16"))
refused(raw.AddLoraError, ["limits"], limits="none")
try:
    raw.add_lora(**(arguments | {"out": out}))
    raise AssertionError("accepted")
except TypeError as error:
    assert "out: expected a numpy.ndarray, as y is, got DeviceTensor" in str(error), error
assert control().calls("aclnnAddLoraGetWorkspaceSize") == before
assert (read(out, arguments["y"]) == 7).all()

for pointer, shape, dtype, kind in [
    (16, [4], "float16", ValueError), (0, [4], "float16", ValueError), (-32, [4], "float16", ValueError),
    (2**64, [4], "float16", ValueError), (32, [-1], "float16", ValueError), (32, [2**62, 8], "float16", ValueError),
    (32.0, [4], "float16", TypeError), (32, [4], "no dtype", TypeError), (True, [1], "int32", TypeError)]:
    try:
        raw.device_tensor(pointer, shape, dtype)
    except kind:
        continue
    raise AssertionError((pointer, shape, dtype))
assert raw.device_tensor(0, [0, 4], np.float16).shape == (0, 4)
""",
    )


def test_index_w_is_skipped_on_a_310p_with_32_adapters_too(run):
    run(
        ON_DEVICE
        + """
arguments = problem(w=32, b=40)
assert (arguments["indices"] == 32).any()
expected = raw.add_lora(**arguments, rounding="device")
near(raw.add_lora(**arguments, backend="aclnn"), expected)
out = on_device(np.zeros_like(arguments["y"]))
near(read(raw.add_lora(**place(arguments), out=out), expected), expected)
assert control().misuse() == 0, control().misuse_log()
""",
        EMU_SOC="Ascend310P3",
    )


def test_a_row_of_x_that_the_cores_cannot_hold_is_refused(run):
    run(
        """
for h1 in (49152, 49168):
    arguments = problem(b=2, h1=h1, w=1, layers=1)
    arguments["indices"][:] = 0
    try:
        out = raw.add_lora(**arguments, backend="aclnn")
        assert h1 == 49152 and out.shape == (2, 80)
    except raw.AddLoraError as error:
        assert h1 == 49168 and error.code == 561002
        assert "H1 <= 49152 on the NPU, got H1 = 49168" in str(error), error
""",
    )


@pytest.mark.parametrize("stream_mode", ["sync", "thread"])
def test_an_executor_that_is_dropped_waits_for_its_work(run, stream_mode):
    run(
        ON_DEVICE
        + """
arguments = problem()
placed = place(arguments)
out = on_device(np.full_like(arguments["y"], 7))
ordered = [placed[n] for n in ("y", "x", "weight_b", "indices", "weight_a")]
expected = raw.add_lora(**arguments, rounding="device")
workspace = raw.device_tensor(cann.malloc(20_000_000), [20_000_000], "uint8")
for destroy_first in (False, True):
    stream = cann.stream()
    live = control().live()
    size, executor = raw.add_lora_get_workspace_size(*ordered, 0, 1.0, 0, -1, out)
    raw.add_lora_execute(workspace, executor, stream.value)
    if destroy_first:  # the caller's stream may be gone by then
        cann.aclrtSynchronizeStream(stream)
        cann.aclrtDestroyStream(stream)
        live -= 1
    del executor
    assert control().live() == live, control().report()
    if not destroy_first:
        cann.aclrtSynchronizeStream(stream)
    near(read(out, expected), expected)
assert control().misuse() == 0, control().misuse_log()

# Dropped in a thread that was on no device: giving things back needs one.
import threading
runtime = ctypes.CDLL(os.environ["ASCEND_HOME_PATH"] + "/lib64/libascendcl.so")
host_out = np.empty_like(arguments["y"])
hosts = [arguments[n] for n in ("y", "x", "weight_b", "indices", "weight_a")]
seen, number = [], ctypes.c_int32()
for plan in (lambda: raw.add_lora_get_workspace_size(*ordered, 0, 1.0, 0, -1, out),
             lambda: raw.add_lora_get_workspace_size(*hosts, 0, 1.0, 0, -1, host_out, backend="aclnn")):
    held = list(plan())
    def drop():
        seen.append(runtime.aclrtGetDevice(ctypes.byref(number)))
        held.clear()
        seen.append(runtime.aclrtGetDevice(ctypes.byref(number)))
    thread = threading.Thread(target=drop)
    thread.start(); thread.join()
assert seen == [107002, 0, 107002, 0], seen
""",
        EMU_STREAM_MODE=stream_mode,
        EMU_STREAM_DELAY_US="20000",
    )


def test_a_repeatable_executor_on_two_streams(run):
    run(
        ON_DEVICE
        + """
arguments = problem()
placed = place(arguments)
ordered = [placed[n] for n in ("y", "x", "weight_b", "indices", "weight_a")]
expected = raw.add_lora(**arguments, rounding="device")
size, executor = raw.add_lora_get_workspace_size(*ordered, 0, 1.0, 0, -1, placed["y"])
executor.set_repeatable()
workspace = raw.device_tensor(cann.malloc(size), [size], "uint8")
first, second = cann.stream(), cann.stream()
raw.add_lora_execute(workspace, executor, first.value)
nobody = np.full_like(arguments["indices"], -1)
cann.aclrtMemcpy(placed["indices"].pointer, nobody.nbytes, nobody.ctypes.data, nobody.nbytes, 1)
raw.add_lora_execute(workspace, executor, second.value)
cann.aclrtSynchronizeStream(second)
cann.aclrtSynchronizeStream(first)
near(read(placed["y"], expected), expected)  # added once, by the indices of the first run
""",
        EMU_STREAM_MODE="sync",
    )


def test_two_threads_run_one_repeatable_executor(run):
    run(
        """
import threading
arguments = problem(b=400)
out = np.empty_like(arguments["y"])
expected = raw.add_lora(**arguments, rounding="device")
ordered = [arguments[n] for n in ("y", "x", "weight_b", "indices", "weight_a")]
size, executor = raw.add_lora_get_workspace_size(*ordered, 0, 1.0, 0, -1, out, backend="aclnn")
executor.set_repeatable()
errors = []
def work():
    try:
        for _ in range(20):
            raw.add_lora_execute(None, executor)
            near(out, expected)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not errors, errors[:2]
assert control().misuse() == 0, control().misuse_log()
""",
        EMU_STREAM_MODE="thread",
    )


def test_the_device_that_the_thread_is_on_is_the_one_used(run):
    run(
        ON_DEVICE
        + """
import threading
runtime = ctypes.CDLL(os.environ["ASCEND_HOME_PATH"] + "/lib64/libascendcl.so")
def device():
    number = ctypes.c_int32(-1)
    return number.value if runtime.aclrtGetDevice(ctypes.byref(number)) == 0 else None
arguments = problem()
expected = raw.add_lora(**arguments, rounding="device")
cann.aclrtSetDevice(3)
near(raw.add_lora(**arguments, backend="aclnn"), expected)
assert device() == 3
cann.aclrtSetDevice(2)
near(raw.add_lora(**arguments, backend="aclnn"), expected)
assert device() == 2
def elsewhere():
    assert device() is None
    near(raw.add_lora(**arguments, backend="aclnn"), expected)
    seen.append(device())
    cann.aclrtResetDevice(0)
    cann.aclrtResetDevice(0)
    assert device() is None
    near(raw.add_lora(**arguments, backend="aclnn"), expected)
    seen.append(device())
seen = []
thread = threading.Thread(target=elsewhere)
thread.start(); thread.join()
assert seen == [0, 0], seen
""",
        EMU_DEVICE_COUNT="4",
    )


@pytest.mark.parametrize("stream_mode", ["sync", "thread"])
def test_each_call_may_fail_with_tensors_on_the_device(run, stream_mode):
    run(
        ON_DEVICE
        + """
arguments = problem()
placed = place(arguments)
out = on_device(np.full_like(arguments["y"], 7))
ordered = [placed[n] for n in ("y", "x", "weight_b", "indices", "weight_a")]
expected = raw.add_lora(**arguments, rounding="device")
workspace = raw.device_tensor(cann.malloc(20_000_000), [20_000_000], "uint8")
stream = cann.stream()

def one_call():
    raw.add_lora(**placed, out=out)

def two_phases_on_a_stream():
    _, executor = raw.add_lora_get_workspace_size(*ordered, 0, 1.0, 0, -1, out)
    raw.add_lora_execute(workspace, executor, stream.value)
    del executor
    cann.aclrtSynchronizeStream(stream)

functions = ("aclrtMalloc", "aclrtMemcpy", "aclrtMemcpyAsync", "aclrtCreateStream", "aclrtSynchronizeStream",
             "aclrtCreateEvent", "aclrtRecordEvent", "aclCreateTensor", "aclnnAddLoraGetWorkspaceSize",
             "aclSetAclOpExecutorRepeatable", "aclnnAddLora", "aclnnAddLora.kernel")
failed = set()
for call in (one_call, two_phases_on_a_stream):
    call()
    live = control().live()
    for function in functions:
        for nth in range(1, 9):
            before = control().calls(function)
            control().fail(function, 507015, "the reason of this test", nth=nth)
            try:
                call()
            except (raw.AclError, cann_client.CannError) as error:
                failed.add((call.__name__, function))
                assert "the reason of this test" in str(error), (function, nth, error)
            reached = control().calls(function) - before >= nth
            control().clear_failures()
            assert control().live() == live, (call.__name__, function, nth, control().report())
            call()
            near(read(out, expected), expected)
            if not reached:
                break
# The streams are the caller's in two phases, and the events are made there only.
assert len(failed) == 2 * len(functions) - 3, failed
assert control().misuse() == 0, control().misuse_log()
""",
        EMU_STREAM_MODE=stream_mode,
    )


def test_what_describes_a_tensor_on_the_device(run):
    run(
        """
tensor = raw.device_tensor(np.uint64(4096), np.array([9, 80]), "float16")
assert (tensor.pointer, tensor.shape) == (4096, (9, 80))
for pointer, shape, dtype, kind, words in [
    (4096, [9.7, 80], "float16", TypeError, "shape: expected integers, got float"),
    (4096, [True, 80], "float16", TypeError, "shape: expected integers, got bool"),
    (4096, "98", "float16", TypeError, "shape: expected integers, got str"),
    (4096, 9, "float16", TypeError, "shape: expected a sequence of integers, got int"),
    (4096, [2**63], "float16", ValueError, "shape"),
    (4096, [2**70, 0], "float16", ValueError, "shape"),
    (2**63 - 32, [9, 80], "float16", ValueError, "pointer"),
    (2**64 - 32, [9, 80], "float16", ValueError, "pointer"),
    (np.float64(4096), [9], "float16", TypeError, "pointer: expected an integer, got float64"),
    (np.array([4096]), [9], "float16", TypeError, "pointer: expected an integer, got ndarray"),
]:
    try:
        raw.device_tensor(pointer, shape, dtype)
        raise AssertionError(f"accepted {pointer} {shape} {dtype}")
    except kind as error:
        assert words in str(error), error
# Big-endian elements are another dtype, as in arrays; None is none.
assert raw.device_tensor(4096, [9], ">f2").dtype == ">f2"
try:
    raw.device_tensor(4096, [9], None)
    raise AssertionError("accepted")
except TypeError as error:
    assert "dtype" in str(error)
""",
        None,
    )


def test_a_forked_child_does_not_wait_for_its_parent_s_work(run):
    run(
        ON_DEVICE
        + """
arguments = problem()
placed = place(arguments)
out = on_device(np.full_like(arguments["y"], 7))
ordered = [placed[n] for n in ("y", "x", "weight_b", "indices", "weight_a")]
expected = raw.add_lora(**arguments, rounding="device")
size, executor = raw.add_lora_get_workspace_size(*ordered, 0, 1.0, 0, -1, out)
workspace = raw.device_tensor(cann.malloc(size), [size], "uint8")
stream = cann.stream()
raw.add_lora_execute(workspace, executor, stream.value)
child = os.fork()
if child == 0:
    del executor
    os._exit(0)
import time
for _ in range(200):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.05)
else:
    os.kill(child, 9)
    raise AssertionError("the child hangs")
assert status == 0
cann.aclrtSynchronizeStream(stream)
near(read(out, expected), expected)
""",
        EMU_STREAM_MODE="thread",
        EMU_STREAM_DELAY_US="200000",
    )
