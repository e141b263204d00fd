"""Writing adapters into the slots of a bank: A [W, L, R, H1] and B [W, L, H2, R].

Everything is checked before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import ml_dtypes
import numpy as np
import numpy.typing as npt
from mindspore import Parameter, Tensor
from mindspore.graph.api import _pynative_executor

from .ascend.blocks import Block, padding

Array = npt.NDArray[Any]

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def to_float32(name: str, value: Array | Tensor, dimensions: int = 2) -> npt.NDArray[np.float32]:
    """A weight as float32; refuses what is not a matrix of floats."""
    array = value.asnumpy() if isinstance(value, Tensor) else value
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected a numpy.ndarray or a Tensor, got {type(value).__name__}")
    if array.dtype.name not in _FLOATS:
        raise TypeError(f"{name}: expected a float dtype, got {array.dtype}")
    if array.ndim != dimensions:
        raise ValueError(f"{name}: expected {dimensions} dimensions, got shape {list(array.shape)}")
    if (
        array.dtype.name == "bfloat16"
    ):  # MindSpore registers another one with numpy, and casts between them are few
        array = array.view(ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):  # whoever writes it into a bank looks for that
        return array.astype(np.float32)


def _finite(value: Array | Tensor) -> npt.NDArray[np.bool_]:
    array = value.asnumpy() if isinstance(value, Tensor) else value
    if array.dtype.name == "bfloat16":
        array = array.view(ml_dtypes.bfloat16).astype(np.float32)
    return np.isfinite(array)


def check_slot(name: str, value: int, count: int) -> None:
    """Refuses a slot or layer outside [0, count): a negative one would mean another slot, not none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if not 0 <= value < count:
        raise ValueError(f"{name}: expected 0 <= {name} < {count}, got {value}")


def prepare_adapter(
    a: Array | Tensor,
    b: Array | Tensor,
    scaling: float,
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    dtype: npt.DTypeLike,
) -> tuple[Array, Array]:
    """The blocks of a slot for a [r, H1] and b [H2, r]: padded with zeros to [R, H1] and [H2, R], scaling in b."""
    rank, h1 = a_shape
    h2 = b_shape[0]
    a32, b32 = to_float32("a", a), to_float32("b", b)
    r = a32.shape[0]
    if not 1 <= r <= rank or a32.shape[1] != h1:
        raise ValueError(
            f"a: expected [r, {h1}] with 1 <= r <= {rank}, got shape {list(a32.shape)}"
        )
    if b32.shape != (h2, r):
        raise ValueError(f"b: expected [{h2}, {r}], r as a has, got shape {list(b32.shape)}")
    if not math.isfinite(scaling):
        raise ValueError(f"scaling: expected a finite number, got {scaling}")
    if np.dtype(dtype).name == "bfloat16":
        dtype = ml_dtypes.bfloat16
    a_block = np.zeros((rank, h1), dtype)
    b_block = np.zeros((h2, rank), dtype)
    with np.errstate(over="ignore"):  # looked for below
        a_block[:r] = a32
        b_block[:, :r] = b32 * np.float32(scaling)
    for name, given, source, block in (
        ("a", a, a32, a_block[:r]),
        ("b", b, b32, b_block[:, :r]),
    ):
        # Where the source is finite the bank must be; what was infinite or NaN stays so.
        if (_finite(given) & ~np.isfinite(block.astype(np.float32))).any():
            raise ValueError(
                f"{name}: expected values that {np.dtype(dtype).name} can hold (scaling included), "
                f"got up to {np.abs(source).max() * (scaling if name == 'b' else 1.0):g}"
            )
    return a_block, b_block


def wait_for_steps() -> None:
    """Waits for the steps that are under way: they read the banks and the route."""
    if ms.get_context("device_target") == "Ascend":
        ms.runtime.synchronize()
    else:
        _pynative_executor.sync()  # ms.runtime.synchronize refuses the CPU


def wait_for_readers() -> None:
    """Before a write: on the CPU steps that are under way read the very memory; on Ascend the write takes its turn."""
    if ms.get_context("device_target") != "Ascend":
        wait_for_steps()


def write_whole(parameter: Parameter, values: Array) -> None:
    """Writes all of a parameter in place, as :func:`write_block` writes a slot."""
    if ms.get_context("device_target") == "Ascend":
        parameter[:].copy_(Tensor(values))
        return
    parameter.asnumpy()[...] = values.view(parameter.asnumpy().dtype)


def write_block(parameter: Parameter, slot: int, layer: int, block: Array) -> None:
    """Writes one slot of one layer in place, so that a compiled graph sees it without a new one."""
    if ms.get_context("device_target") == "Ascend":
        # A view of the device's memory; nothing but the block is copied.
        parameter[slot, layer].copy_(Tensor(block.astype(np.float32), parameter.dtype))
        return
    # On the CPU a Tensor's numpy view shares its memory.
    bank = parameter.asnumpy()
    if bank.dtype.name == "bfloat16":
        bank = bank.view(ml_dtypes.bfloat16)
    bank[slot, layer] = block


def in_blocks(bank: Array, blocks: Sequence[Block], rank_axis: int) -> list[Array]:
    """A bank as the device's blocks, each rank span padded with zeros to a multiple of 16."""
    parts = []
    for (slot, slots), (layer, layers), (rank, ranks) in blocks:
        part = bank[slot : slot + slots, layer : layer + layers]
        part = np.take(part, range(rank, rank + ranks), axis=rank_axis)
        missing = [(0, padding(ranks) if axis == rank_axis else 0) for axis in range(4)]
        parts.append(np.ascontiguousarray(np.pad(part, missing)))
    return parts


def write_in_blocks(
    parameters: Sequence[Parameter],
    blocks: Sequence[Block],
    slot: int,
    layer: int,
    matrix: Array,
    rank_axis: int,
) -> None:
    """Writes a slot's matrix into every block that has a part of it."""
    for parameter, block in zip(parameters, blocks, strict=True):
        (first, slots), (first_layer, layers), (rank, ranks) = block
        if not (first <= slot < first + slots and first_layer <= layer < first_layer + layers):
            continue
        part = np.take(matrix, range(rank, rank + ranks), axis=rank_axis)
        missing = [(0, padding(ranks) if axis == rank_axis else 0) for axis in range(2)]
        write_block(parameter, slot - first, layer - first_layer, np.pad(part, missing))


def read_block(parameter: Parameter, slot: int, layer: int) -> Array:
    """A copy of one slot of one layer."""
    block: Array = parameter[slot, layer].asnumpy().copy()
    return block.view(ml_dtypes.bfloat16) if block.dtype.name == "bfloat16" else block


def read_from_blocks(
    parameters: Sequence[Parameter],
    blocks: Sequence[Block],
    slot: int,
    layer: int,
    matrix: Array,
    rank_axis: int,
) -> None:
    """Fills a slot's matrix from every block that has a part of it."""
    for parameter, block in zip(parameters, blocks, strict=True):
        (first, slots), (first_layer, layers), (rank, ranks) = block
        if not (first <= slot < first + slots and first_layer <= layer < first_layer + layers):
            continue
        part = np.take(
            read_block(parameter, slot - first, layer - first_layer), range(ranks), axis=rank_axis
        )
        if rank_axis == 0:
            matrix[rank : rank + ranks] = part
        else:
            matrix[:, rank : rank + ranks] = part
