"""A bank of any size as blocks that the device takes: at most 32 adapters, 32 layers and 128 ranks, a multiple of 16.

What exceeds them is padded or split, exactly: zeros add nothing, a rank's parts are added one after the other, and a
row's adapter lies in one part of the bank, where the other parts have no adapter for it.
"""

from __future__ import annotations

from .. import _core

MULTIPLE: int = _core.LIMITS["multiple"]
MAX_RANK: int = _core.LIMITS["rank"]
MAX_ADAPTERS: int = _core.LIMITS["adapters"]
MAX_LAYERS: int = _core.LIMITS["layers"]

# (first, count) of the adapters, of the layers and of the ranks; plain, as MindSpore's compiler reads them.
Span = tuple[int, int]
Block = tuple[Span, Span, Span]


def spans(count: int, largest: int) -> list[Span]:
    """count as parts of at most ``largest``, one after the other."""
    return [(first, min(largest, count - first)) for first in range(0, count, largest)]


def split(adapters: int, layers: int, rank: int) -> tuple[Block, ...]:
    """The blocks of a bank; their ranks may be short of a multiple of 16, and are padded then."""
    return tuple(
        (adapter_span, layer_span, rank_span)
        for layer_span in spans(layers, MAX_LAYERS)
        for adapter_span in spans(adapters, MAX_ADAPTERS)
        for rank_span in spans(rank, MAX_RANK)
    )


def padding(ranks: int) -> int:
    """The ranks that a block lacks to a multiple of 16."""
    return -ranks % MULTIPLE
