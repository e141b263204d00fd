"""A call of any size as calls that the device takes, in float16 and in the blocks of blocks.py."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, ops
from mindspore.ops.primitive import constexpr

from .. import _core
from . import blocks, extension
from .gradients import block, expand_block

_MAX_LAYERS = blocks.MAX_LAYERS


@constexpr
def available() -> bool:
    """Whether calls go to the NPU. Asked while a graph is compiled, so the operator is there when it is met."""
    if ms.get_context("device_target") != "Ascend":
        return False
    extension.load()
    return True


@constexpr
def check_target() -> bool:
    """Refuses a bank that is held as the NPU takes it where calls do not go there."""
    target = ms.get_context("device_target")
    if target != "Ascend":
        raise RuntimeError(
            f"the cell's bank was made for Ascend, and device_target is {target} now: call mindspore.set_device before "
            "the cell is made"
        )
    extension.load()
    return True


@constexpr
def check_sizes(
    adapters: int, layers: int, h2: int, rank: int, h1: int | None, h3: int | None
) -> bool:
    """Refuses widths that are not multiples of 16 (padding them would copy every row of every call), and what the
    device would compute wrongly without an error."""
    for argument, name, width in (("x", "H1", h1), ("weight_b", "H2", h2), ("y", "H3", h3)):
        if width is not None and width % blocks.MULTIPLE != 0:
            _core.refuse_width(argument, name, width)
    _core.check_device_sizes(
        min(adapters, blocks.MAX_ADAPTERS),
        min(layers, blocks.MAX_LAYERS),
        h2,
        min(rank + blocks.padding(rank), blocks.MAX_RANK),
        h1,
    )
    return True


@constexpr
def check_layer_is_constant(layer_idx: int | None) -> bool:
    """Which block of layers runs is decided when the graph is compiled."""
    if layer_idx is None:
        raise TypeError(
            f"layer_idx: expected a constant where a cell on the NPU has more than {_MAX_LAYERS} layers, got a mutable "
            "value"
        )
    return True


@constexpr
def split(adapters: int, layers: int, rank: int) -> tuple[blocks.Block, ...]:
    """blocks.split, while a graph is compiled."""
    return blocks.split(adapters, layers, rank)


@constexpr
def padding(ranks: int) -> int:
    """blocks.padding, while a graph is compiled."""
    return blocks.padding(ranks)


def rows_of(indices: Tensor, y: Tensor) -> Tensor:
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


def _flat(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are added to, and those of x, in float16: the device knows no other dtype."""
    values = ops.reshape(x, (-1, x.shape[-1]))
    total = ops.reshape(y, (-1, y.shape[-1]))
    if y.dtype != ms.float16:
        # The products over a zero accumulator, which is then cast and added.
        values = ops.cast(values, ms.float16)
        total = mint.zeros_like(total, dtype=ms.float16)
    return total, values


def _shaped(total: Tensor, y: Tensor, rows: Tensor, adapters: int) -> Tensor:
    if y.dtype != ms.float16:
        flat = ops.reshape(y, total.shape)
        has_adapter = ops.reshape(ops.logical_and(rows >= 0, rows < adapters), (-1, 1))
        # Chosen, not added: -0 + 0 is 0, and a NaN that takes part in an addition is another one.
        total = ops.select(has_adapter, flat + ops.cast(total, y.dtype), flat)
    return ops.reshape(total, y.shape)


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
    """``mal.add_lora`` on the NPU, after the rules have been asked. Banks that do not fit are copied, part by part."""
    adapters, layers, h2, rank = weight_b.shape
    h1 = None if weight_a is None else x.shape[-1]
    check_sizes(adapters, layers, h2, rank, h1, y.shape[-1])
    total, values = _flat(y, x)
    rows = rows_of(indices, y)

    if layers > _MAX_LAYERS:
        weight_b = weight_b[:, layer_idx : layer_idx + 1]
        if weight_a is not None:
            weight_a = weight_a[:, layer_idx : layer_idx + 1]
        layer_idx, layers = 0, 1

    for (first, count), _, (rank_begin, ranks) in split(adapters, layers, rank):
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
        missing = padding(ranks)
        if missing > 0:
            part_b = mint.nn.functional.pad(part_b, (0, missing))
            if part_a is not None:
                part_a = mint.nn.functional.pad(part_a, (0, 0, 0, missing))
            else:
                part_x = mint.nn.functional.pad(part_x, (0, missing))
        if part_b.dtype != ms.float16:
            part_b = ops.cast(part_b, ms.float16)
            if part_a is not None:
                part_a = ops.cast(part_a, ms.float16)
        local = _guarded(rows, first, count)
        if part_a is None:
            total = expand_block(total, part_x, part_b, local, layer_idx, scale, y_offset)
        else:
            total = block(total, part_x, part_b, local, part_a, layer_idx, scale, y_offset)
    return _shaped(total, y, rows, adapters)


def add_lora_in_blocks(
    y: Tensor,
    x: Tensor,
    bank_b: tuple[Tensor, ...],
    indices: Tensor,
    bank_a: tuple[Tensor, ...],
    bank_blocks: tuple[blocks.Block, ...],
    adapters: int,
    layer_idx: int,
    scale: float,
    y_offset: int,
) -> Tensor:
    """The same for a bank that is held as blocks, in float16 and with padded ranks: no weight is copied."""
    if bank_blocks[-1][1][0] > 0:
        check_layer_is_constant(layer_idx)
    total, values = _flat(y, x)
    rows = rows_of(indices, y)
    for number in range(len(bank_blocks)):
        (first, count), (first_layer, layers), _ = bank_blocks[number]
        if len(bank_blocks) == 1 or first_layer <= layer_idx < first_layer + layers:
            total = block(
                total,
                values,
                bank_b[number],
                _guarded(rows, first, count),
                bank_a[number],
                layer_idx - first_layer,
                scale,
                y_offset,
            )
    return _shaped(total, y, rows, adapters)
