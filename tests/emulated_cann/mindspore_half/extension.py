"""One operator for every mode of MindSpore on Ascend: PyNative, GRAPH_MODE and ms.jit, weight_a or not.

Needs g++ and CANN's headers, and builds for half a minute, once.
"""

from pathlib import Path

from mindspore import ops
from mindspore.ops import signature as sig
from mindspore.ops.primitive import Primitive

HERE = Path(__file__).resolve().parent
SOURCES = ("eager_extension.cpp", "graph_definition.cpp", "graph_extension.cpp")


# What graph_definition.cpp registers.
NAME = "Custom_add_lora"


def load(build_dir=None):
    """Builds what is not built yet. Returns the C++ module (for its in-place add_lora_) and the operator."""
    module = ops.CustomOpBuilder(
        "addlora_extension", [str(HERE / each) for each in SOURCES], backend="Ascend", build_dir=build_dir).load()
    return module.so_module, AddLora(module.so_module.add_lora)


class AddLora(Primitive):
    """add_lora(y, x, weight_b, indices, layer_idx, scale, y_offset, y_slice_size, weight_a=None)"""

    __mindspore_signature__ = (
        *(sig.make_sig(name) for name in (
            "y", "x", "weight_b", "indices", "layer_idx", "scale", "y_offset", "y_slice_size")),
        sig.make_sig("weight_a", default=None),
    )

    def __init__(self, eager):
        super().__init__(NAME)
        self._eager = eager

    def __call__(self, y, x, weight_b, indices, layer_idx, scale, y_offset, y_slice_size, weight_a=None):
        # In PyNative only: a graph never gets here.
        return self._eager(y, x, weight_b, indices, layer_idx, scale, y_offset, y_slice_size, weight_a)
