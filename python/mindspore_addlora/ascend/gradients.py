"""The operator on the NPU for one block of a bank, with its gradients.

CANN has no backward operator, so the gradients are composed: of aclnnAddLora itself, with the banks exchanged and turned,
for what a row needs, and of one product for each adapter for what an adapter needs. cpp/gradients.hpp has the formulas;
each product here is rounded to float16, as the operator rounds.
"""

from __future__ import annotations

import functools
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, nn, ops

from .._recorded import need_gradients
from . import extension


def _turned(bank: Tensor) -> Tensor:
    """A copy with the last two dimensions exchanged."""
    return mint.clone(ops.transpose(bank, (0, 1, 3, 2)))


def _product(x: Tensor, bank: Tensor, indices: Tensor, scale: float) -> Tensor:
    """scale * x[i] @ bank[indices[i], 0].T, and zero for rows without an adapter: the operator without its first half."""
    columns = bank.shape[2]
    zeros = mint.zeros((x.shape[0], columns), dtype=ms.float16)
    return extension.operator(zeros, x, bank, indices, 0, scale, 0, columns, None)


def _sums(left: Tensor, right: Tensor, indices: Tensor, adapters: int, scale: float) -> Tensor:
    """[W, 1, n, m]: for each adapter scale * the sum over its rows of left[i].T @ right[i]. Rows of others are chosen
    away in both, not multiplied by zero."""
    parts = []
    for adapter in range(adapters):
        mine = ops.reshape(indices == adapter, (-1, 1))
        ours = ops.select(mine, left, mint.zeros_like(left))
        others = ops.select(mine, right, mint.zeros_like(right))
        parts.append(ops.matmul(ops.transpose(ours, (1, 0)), others) * scale)
    return ops.reshape(ops.concat(parts, 0), (adapters, 1, left.shape[1], right.shape[1]))


def _in_layer(gradient: Tensor, layer_idx: int, layers: int) -> Tensor:
    """The gradient of one layer, with zeros for the others."""
    if layers == 1:
        return gradient
    zeros = mint.zeros_like(gradient)
    return ops.concat([gradient if layer == layer_idx else zeros for layer in range(layers)], 1)


class _Block(nn.Cell):
    """One call of the operator, differentiable in y, x, weight_b and weight_a."""

    def __init__(self, need_x: bool = True, need_b: bool = True, need_a: bool = True) -> None:
        super().__init__()
        self.need_x, self.need_b, self.need_a = need_x, need_b, need_a

    def __call__(self, y: Tensor, x: Tensor, weight_b: Tensor, indices: Tensor, *rest: Any) -> Any:
        """In PyNative, the block that records only the gradients that are needed; graphs compile construct."""
        recorded = _recorded_block(*need_gradients(x, weight_b, rest[0]))
        return nn.Cell.__call__(recorded, y, x, weight_b, indices, *rest)

    def construct(
        self,
        y: Tensor,
        x: Tensor,
        weight_b: Tensor,
        indices: Tensor,
        weight_a: Tensor,
        layer_idx: int,
        scale: float,
        y_offset: int,
    ) -> Tensor:
        # H2 written out: older CANN refuses -1.
        return extension.operator(
            y, x, weight_b, indices, layer_idx, scale, y_offset, weight_b.shape[2], weight_a
        )

    def bprop(
        self,
        y: Tensor,
        x: Tensor,
        weight_b: Tensor,
        indices: Tensor,
        weight_a: Tensor,
        layer_idx: int,
        scale: float,
        y_offset: int,
        out: Tensor,
        dout: Tensor,
    ) -> tuple[Any, ...]:
        adapters, layers, h2, _ = weight_b.shape
        b = weight_b[:, layer_idx : layer_idx + 1]
        a = weight_a[:, layer_idx : layer_idx + 1]
        slice_ = dout[:, y_offset : y_offset + h2]
        dx, db, da = None, None, None
        if self.need_x or self.need_a:
            dz = _product(slice_, _turned(b), indices, 1.0)
            if self.need_x:
                dx = _product(dz, _turned(a), indices, scale)
            if self.need_a:
                da = _in_layer(_sums(dz, x, indices, adapters, scale), layer_idx, layers)
        if self.need_b:
            z = _product(x, a, indices, 1.0)
            db = _in_layer(_sums(slice_, z, indices, adapters, scale), layer_idx, layers)
        return dout, dx, db, ops.zeros_like(indices), da, 0, 0, 0


class _ExpandBlock(nn.Cell):
    """The same without weight_a."""

    def __init__(self, need_x: bool = True, need_b: bool = True) -> None:
        super().__init__()
        self.need_x, self.need_b = need_x, need_b

    def __call__(self, y: Tensor, x: Tensor, weight_b: Tensor, *rest: Any) -> Any:
        recorded = _recorded_expand_block(*need_gradients(x, weight_b))
        return nn.Cell.__call__(recorded, y, x, weight_b, *rest)

    def construct(
        self,
        y: Tensor,
        x: Tensor,
        weight_b: Tensor,
        indices: Tensor,
        layer_idx: int,
        scale: float,
        y_offset: int,
    ) -> Tensor:
        return extension.operator(
            y, x, weight_b, indices, layer_idx, scale, y_offset, weight_b.shape[2], None
        )

    def bprop(
        self,
        y: Tensor,
        x: Tensor,
        weight_b: Tensor,
        indices: Tensor,
        layer_idx: int,
        scale: float,
        y_offset: int,
        out: Tensor,
        dout: Tensor,
    ) -> tuple[Any, ...]:
        adapters, layers, h2, _ = weight_b.shape
        slice_ = dout[:, y_offset : y_offset + h2]
        b = weight_b[:, layer_idx : layer_idx + 1]
        dx, db = None, None
        if self.need_x:
            dx = _product(slice_, _turned(b), indices, scale)
        if self.need_b:
            db = _in_layer(_sums(slice_, x, indices, adapters, scale), layer_idx, layers)
        return dout, dx, db, ops.zeros_like(indices), 0, 0, 0


# At most eight and four: made when they are first needed.
_recorded_block = functools.cache(_Block)
_recorded_expand_block = functools.cache(_ExpandBlock)

block = _Block()
expand_block = _ExpandBlock()
