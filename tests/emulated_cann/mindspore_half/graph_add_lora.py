"""aclnnAddLora in a MindSpore graph on Ascend (GRAPH_MODE and ms.jit), through ops.Custom."""

import subprocess
from pathlib import Path

from mindspore import mint, ops
from mindspore.ops import CustomRegOp, DataType

HERE = Path(__file__).resolve().parent


def _reg_info():
    # Made anew for each ops.Custom, which changes what it is given: a second one would ask for an operator named
    # aclnnCustom_aclnnAddLora_aclnnAddLora and crash.
    half, whole = DataType.F16_Default, DataType.I32_Default
    return (
        CustomRegOp("aclnnAddLora")
        .input(0, "y", "required")
        .input(1, "x", "required")
        .input(2, "weight_b", "required")
        .input(3, "indices", "required")
        .input(4, "weight_a", "required")
        .output(0, "out", "required")
        .dtype_format(half, half, half, whole, half, half)
        # No value= on any of these, and double, never float, for scale.
        .attr("layer_idx", "required", "int")
        .attr("scale", "required", "double")
        .attr("y_offset", "required", "int")
        .attr("y_slice_size", "required", "int")
        .target("Ascend")
        .get_op_info()
    )


def build_inference(build_dir):
    """Compiles the shape inference in C++, which dynamic shapes need; returns the library's path."""
    library = Path(build_dir).resolve() / "libadd_lora_inference.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0", "-o", str(library),
         str(HERE / "graph_inference.cpp")], check=True)
    return library


def make_add_lora(inference_library=None):
    """Returns add_lora(y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size), to be called inside
    construct or a jitted function; all four scalars are needed.

    Without a library the shapes must be static. With one, static and dynamic shapes work; where they are dynamic the
    scalars may be mutable().
    """
    if inference_library is None:
        func, out_shape = "aclnnAddLora", lambda y, *rest: y
    else:
        func, out_shape = f"{inference_library}:aclnnAddLora", None
    custom = ops.Custom(func, out_shape=out_shape, out_dtype=lambda y, *rest: y, func_type="aot", reg_info=_reg_info())

    def add_lora(y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size):
        # The operator adds into its first input and never writes its output: it gets a real copy of y, and what is
        # returned is that copy, made to depend on the call. ops.identity(y) would be optimised away.
        accumulated = mint.clone(y)
        called = custom(accumulated, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, y_slice_size)
        return ops.depend(accumulated, called)

    return add_lora
