"""Which gradients a PyNative call may be asked for.

A graph drops the operators of gradients that nobody uses. PyNative runs all that a backward function computes, so there
each call records one that computes what its tensors need, and nothing more.
"""

from __future__ import annotations

from mindspore import Tensor

__all__ = ["need_gradients"]


def need_gradients(*tensors: Tensor) -> tuple[bool, ...]:
    """Whether a gradient flows to each: to parameters that require one, to the arguments of a differentiated function,
    and to what was computed from these."""
    # Where MindSpore does not say so, all of them may.
    return tuple(bool(getattr(tensor, "_requires_grad", True)) for tensor in tensors)
