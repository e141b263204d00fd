"""A problem of reference.py through MindSpore."""

from __future__ import annotations

import mindspore as ms
import mindspore_addlora as mal
from mindspore import Tensor, nn
from reference import Array, Problem

MS_DTYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32}


class Model(nn.Cell):
    def __init__(self, problem: Problem, rounding: str) -> None:
        super().__init__()
        self.layer_idx, self.scale = problem["layer_idx"], problem["scale"]
        self.y_offset, self.rounding = problem["y_offset"], rounding

    def construct(self, y, x, weight_b, indices, weight_a):
        return mal.add_lora(
            y,
            x,
            weight_b,
            indices,
            weight_a,
            self.layer_idx,
            self.scale,
            self.y_offset,
            -1,
            self.rounding,
        )


def through_mindspore(problem: Problem, rounding: str, mode: int) -> Array:
    ms.set_context(mode=mode)
    dtype = MS_DTYPES[problem["y"].dtype.name]
    tensors = [
        None if problem[name] is None else Tensor(problem[name], dtype)
        for name in ("y", "x", "weight_b", "weight_a")
    ]
    tensors.insert(3, Tensor(problem["indices"]))
    out = Model(problem, rounding)(*tensors).asnumpy()
    return out.view(problem["y"].dtype)
