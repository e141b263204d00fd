"""A call of any size as calls that the device takes: float16, R a multiple of 16 and at most 128, W and L at most 32.

What exceeds them is padded or split, exactly: zeros add nothing, a rank's parts are added one after the other, and a
row's adapter lies in one part of the bank, where the other parts have no adapter for it.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, ops
from mindspore.ops.primitive import constexpr

from .. import _core
from . import extension

_MULTIPLE = 16
_MAX_RANK = 128
_MAX_ADAPTERS = 32
_MAX_LAYERS = 32


@constexpr
def available() -> bool:
    """Whether calls go to the NPU. Asked while a graph is compiled, so the operator is there when it is met."""
    if ms.get_context("device_target") != "Ascend":
        return False
    extension.load()
    return True


@constexpr
def check_widths(h1: int | None, h2: int, h3: int) -> bool:
    """Refuses widths that are not multiples of 16: padding them would copy every row of every call."""
    for argument, name, width in (("x", "H1", h1), ("weight_b", "H2", h2), ("y", "H3", h3)):
        if width is not None and width % _MULTIPLE != 0:
            _core.refuse_width(argument, name, width)
    return True


def _rows_of(indices: Tensor, y: Tensor) -> Tensor:
    """One index for each row of y, flat."""
    if indices.ndim == 1 and y.ndim > 2 and indices.shape[0] == y.shape[0]:
        tokens = 1
        for n in y.shape[1:-1]:
            tokens = tokens * n
        indices = mint.broadcast_to(ops.reshape(indices, (-1, 1)), (-1, tokens))
    return ops.reshape(indices, (-1,))


def _guarded(indices: Tensor, first: int, count: int) -> Tensor:
    """The indices into slots first .. first + count of the bank. Whatever is outside becomes "no adapter" at the width
    that it came in: the device would write outside its memory for an index above W."""
    local = indices - first
    inside = ops.logical_and(local >= 0, local < count)
    return ops.cast(ops.select(inside, local, ops.full_like(local, -1)), ms.int32)


def add_lora(
    y: Tensor,
    x: Tensor,
    weight_b: Tensor,
    indices: Tensor,
    weight_a: Tensor | None,
    layer_idx: int,
    scale: float,
    y_offset: int,
) -> Tensor:
    """``mal.add_lora`` on the NPU, after the rules have been asked."""
    adapters, layers, h2, rank = weight_b.shape
    h3 = y.shape[-1]
    check_widths(None if weight_a is None else x.shape[-1], h2, h3)

    rows = _rows_of(indices, y)
    values = ops.reshape(x, (-1, x.shape[-1]))
    total = ops.reshape(y, (-1, h3))
    if y.dtype != ms.float16:
        # The device knows float16 only: the products in float16 over a zero accumulator, then cast and added.
        values = ops.cast(values, ms.float16)
        total = mint.zeros_like(total, dtype=ms.float16)

    if layers > _MAX_LAYERS:
        weight_b = weight_b[:, layer_idx : layer_idx + 1]
        if weight_a is not None:
            weight_a = weight_a[:, layer_idx : layer_idx + 1]
        layer_idx = 0

    for first in range(0, adapters, _MAX_ADAPTERS):
        count = min(_MAX_ADAPTERS, adapters - first)
        local = _guarded(rows, first, count)
        for rank_begin in range(0, rank, _MAX_RANK):
            ranks = min(_MAX_RANK, rank - rank_begin)
            part_b, part_a, part_x = weight_b, weight_a, values
            if count < adapters:
                part_b = part_b[first : first + count]
                if part_a is not None:
                    part_a = part_a[first : first + count]
            if ranks < rank:
                part_b = part_b[:, :, :, rank_begin : rank_begin + ranks]
                if part_a is not None:
                    part_a = part_a[:, :, rank_begin : rank_begin + ranks]
                else:
                    part_x = part_x[:, rank_begin : rank_begin + ranks]
            padding = -ranks % _MULTIPLE
            if padding > 0:
                part_b = mint.nn.functional.pad(part_b, (0, padding))
                if part_a is not None:
                    part_a = mint.nn.functional.pad(part_a, (0, 0, 0, padding))
                else:
                    part_x = mint.nn.functional.pad(part_x, (0, padding))
            if part_b.dtype != ms.float16:
                part_b = ops.cast(part_b, ms.float16)
                if part_a is not None:
                    part_a = ops.cast(part_a, ms.float16)
            # H2 written out: older CANN refuses -1.
            total = extension.operator(
                total, part_x, part_b, local, layer_idx, scale, y_offset, h2, part_a
            )

    total = ops.reshape(total, y.shape)
    if y.dtype != ms.float16:
        return y + ops.cast(total, y.dtype)
    return total
