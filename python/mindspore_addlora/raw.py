"""numpy in, numpy out: the operator without MindSpore.

``add_lora`` is one call; ``add_lora_get_workspace_size`` and ``add_lora_execute`` are the same in two phases, as
in CANN's aclnn interface. Importing this module does not import MindSpore.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _core
from ._core import DeviceTensor, Executor
from ._errors import AclError, AddLoraError

__all__ = [
    "LIMITS",
    "AclError",
    "AddLoraError",
    "BackendInfo",
    "DeviceTensor",
    "Executor",
    "Rule",
    "add_lora",
    "add_lora_execute",
    "add_lora_get_workspace_size",
    "backends",
    "device_tensor",
    "get_num_threads",
    "kernel_sets",
    "last_kernel_set",
    "set_num_threads",
]

Array = npt.NDArray[Any]
Limits = Literal["npu", "none"]
Rounding = Literal["float32", "device"]


class Rule(NamedTuple):
    """A rule of the operator, as the C++ core holds it."""

    name: str
    applies_to: str
    rule: str
    code: int
    lifted: bool
    """Whether ``limits="none"`` lifts it."""


LIMITS: tuple[Rule, ...] = tuple(Rule(*rule) for rule in _core.rules())
"""The table of rules. A call that breaks one is an :class:`AddLoraError` with its code."""


class BackendInfo(NamedTuple):
    """What is known of a backend."""

    available: bool
    reason: str
    """Why it is not available; empty where it is."""
    detail: str
    """What it runs on: the kernel set, or library paths and SoC."""


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def device_tensor(pointer: int, shape: Sequence[int], dtype: Any) -> DeviceTensor:
    """A tensor that is in the NPU's memory already, for :func:`add_lora` and its two phases: nothing is copied.

    Args:
        pointer (int): The device address of the first element, a multiple of 32 (MindSpore: ``tensor.data_ptr()``).
            Whoever owns the memory keeps it alive until the call's work is done.
        shape (Sequence[int]): The elements lie there one after the other, in C order.
        dtype (numpy dtype, its name, or a MindSpore dtype): float16, int32 for indices, uint8 for a workspace.

    Returns:
        DeviceTensor, with ``pointer``, ``shape`` and ``dtype``.

    Raises:
        ValueError: The address is not aligned or is null, a dimension is negative, or the tensor reaches beyond 63 bits.
        TypeError: An argument is not of the type above.

    Supported Platforms:
        ``Ascend`` (tested on an emulated CANN only)

    Examples:
        >>> from mindspore_addlora import raw
        >>> raw.device_tensor(4096, [2, 16], "float16")
        device_tensor(4096, [2, 16], "float16")
    """
    if not _is_integer(pointer):
        raise TypeError(f"pointer: expected an integer, got {type(pointer).__name__}")
    if not 0 <= pointer < 2**63:
        raise ValueError(f"pointer: expected a device address, a multiple of 32, got {pointer}")
    if not isinstance(shape, Iterable):
        raise TypeError(f"shape: expected a sequence of integers, got {type(shape).__name__}")
    dimensions = list(shape)
    for n in dimensions:
        if not _is_integer(n):
            raise TypeError(f"shape: expected integers, got {type(n).__name__}")
        if not 0 <= n < 2**63:
            raise ValueError(f"shape: expected dimensions of at least 0 that fit 64 bits, got {n}")
    if dtype is None:  # numpy takes it for float64
        raise TypeError("dtype: expected one, got None")
    try:
        described = np.dtype(dtype)
    except TypeError:  # MindSpore's dtypes are named like numpy's, with a capital
        described = np.dtype(str(dtype).lower())
    name = described.name if described.isnative else described.str
    return DeviceTensor(int(pointer), [int(n) for n in dimensions], name, described.itemsize)


def add_lora(
    y: Array | DeviceTensor,
    x: Array | DeviceTensor,
    weight_b: Array | DeviceTensor,
    indices: Array | DeviceTensor,
    weight_a: Array | DeviceTensor | None = None,
    *,
    layer_idx: int = 0,
    scale: float = 1.0,
    y_offset: int = 0,
    y_slice_size: int = -1,
    out: Array | DeviceTensor | None = None,
    backend: str | None = None,
    limits: Limits = "npu",
    rounding: Rounding = "float32",
) -> Any:
    r"""Adds to each row of y the low-rank product of its own adapter.

    .. code-block:: text

        out = y
        out[i, y_offset : y_offset + H2] += scale * (x[i] @ A[indices[i], layer_idx].T) @ B[indices[i], layer_idx].T

    A row whose index is negative or W has no adapter: its row of out is y's, bit for bit. With ``weight_a=None``
    the first product is left out and x is [B, R]. The rules are in :data:`LIMITS`.

    Tensors may be in the NPU's memory (:func:`device_tensor`), all of them or none, and out must be given then. What
    computes them must be done before the call; the indices are read back to be checked; the work is done when the call
    returns.

    Args:
        y (numpy.ndarray): [B, H3], what is added to. Any strides. float16, bfloat16 (``ml_dtypes.bfloat16``) or
            float32, and so are x and the weights.
        x (numpy.ndarray): [B, H1], or [B, R] without weight_a.
        weight_b (numpy.ndarray): [W, L, H2, R], the B of W adapters in L layers.
        indices (numpy.ndarray): int32 [B], the adapter of each row.
        weight_a (numpy.ndarray, optional): [W, L, R, H1], the A of each adapter.
        layer_idx (int): The layer whose weights are used, below L.
        scale (float): A factor of every product.
        y_offset (int): The first column that is added to.
        y_slice_size (int): -1 or H2.
        out (numpy.ndarray, optional): [B, H3], C-contiguous; y itself to work in place. Allocated where it is None.
        backend (str, optional): "cpu", the default for arrays, or "aclnn": the arrays are copied to the NPU, CANN's
            operator runs there, and the result is copied back. float16, limits "npu", and the device's rounding.
        limits (str): "npu" enforces every limit of the NPU, so that what runs here runs there; "none" lifts the
            limits of size.
        rounding (str): "float32" computes in float32 and rounds once, at the end. "device" (float16) rounds where
            the NPU does, to predict its results.

    Returns:
        numpy.ndarray, out (a DeviceTensor where y is one).

    Raises:
        AddLoraError: A rule was broken. Nothing has been written.
        TypeError: An argument is not of the type above.
        ValueError: backend, limits or rounding has an unknown value, or the backend is not available here.
        AclError: A call into CANN failed.
        OverflowError: An integer does not fit 64 bits.

    Supported Platforms:
        ``CPU`` ``Ascend`` (tested on an emulated CANN only)

    Examples:
        >>> import numpy as np
        >>> from mindspore_addlora import raw
        >>> y = np.zeros((3, 16), np.float16)
        >>> x = np.ones((3, 32), np.float16)
        >>> a = np.stack([np.full((1, 16, 32), v, np.float16) for v in (0.5, 0.25)])  # [W=2, L=1, R=16, H1=32]
        >>> b = np.ones((2, 1, 16, 16), np.float16)  # [W, L, H2, R]
        >>> out = raw.add_lora(y, x, b, np.array([1, -1, 0], np.int32), a)
        >>> out[:, 0]
        array([128.,   0., 256.], dtype=float16)
    """
    return _core.add_lora(
        y,
        x,
        weight_b,
        indices,
        weight_a,
        layer_idx,
        scale,
        y_offset,
        y_slice_size,
        out,
        backend,
        limits,
        rounding,
    )


def add_lora_get_workspace_size(
    y: Array | DeviceTensor,
    x: Array | DeviceTensor,
    weight_b: Array | DeviceTensor,
    indices: Array | DeviceTensor,
    weight_a: Array | DeviceTensor | None,
    layer_idx: int,
    scale: float,
    y_offset: int,
    y_slice_size: int,
    out: Array | DeviceTensor,
    *,
    backend: str | None = None,
    limits: Limits = "npu",
    rounding: Rounding = "float32",
) -> tuple[int, Executor]:
    """Phase one: checks the call and plans it. The arguments are those of :func:`add_lora`, in aclnn's order.

    The executor keeps the arrays alive and reads them when it runs. It runs once, unless
    ``executor.set_repeatable()`` is called right after this.

    Returns:
        tuple[int, Executor], the bytes that :func:`add_lora_execute` needs as workspace, and the planned call.

    Raises:
        AddLoraError, TypeError, ValueError, OverflowError: as :func:`add_lora`.

    Supported Platforms:
        ``CPU`` ``Ascend`` (tested on an emulated CANN only)

    Examples:
        >>> import numpy as np
        >>> from mindspore_addlora import raw
        >>> y = np.zeros((2, 16), np.float16)
        >>> x = np.ones((2, 16), np.float16)
        >>> b = np.ones((1, 1, 16, 16), np.float16)
        >>> out = np.empty_like(y)
        >>> size, executor = raw.add_lora_get_workspace_size(
        ...     y, x, b, np.array([0, -1], np.int32), None, 0, 1.0, 0, -1, out)
        >>> raw.add_lora_execute(bytearray(size), executor)
        >>> out[:, 0]
        array([16.,  0.], dtype=float16)
    """
    return _core.add_lora_get_workspace_size(
        y,
        x,
        weight_b,
        indices,
        weight_a,
        layer_idx,
        scale,
        y_offset,
        y_slice_size,
        out,
        backend,
        limits,
        rounding,
    )


def add_lora_execute(workspace: Any, executor: Executor, stream: int | None = None) -> None:
    """Phase two: runs a planned call.

    Args:
        workspace (buffer): Any writable, C-contiguous buffer of at least the bytes that phase one returned, apart
            from the tensors; its contents do not matter. None where that number is 0. Not used with numpy arrays on
            backend "aclnn", where the executor owns the device memory. A :func:`device_tensor` where the tensors are.
        executor (Executor): What phase one returned.
        stream (int, optional): With tensors on the device, the handle of the stream (an ``aclrtStream``) to run on. The
            indices are read back once the stream's earlier work is done; after that the work is only begun, and the
            tensors and the workspace must stay until the stream is synchronised. An executor that is dropped before
            its work is done waits for it. Without a stream, and
            with numpy arrays, the work is done when this returns.

    Raises:
        AddLoraError: 161001 for a missing workspace or executor; 161002 for a spent executor or a workspace that is
            too small, read-only or overlaps a tensor; 561002 for an index above W. A refused run does not spend the
            executor, and nothing has been written.
        TypeError: An argument is not of the type above.

    Supported Platforms:
        ``CPU`` ``Ascend`` (tested on an emulated CANN only)
    """
    _core.add_lora_execute(workspace, executor, stream)


def backends() -> dict[str, BackendInfo]:
    """The backends by name, with what is known of each.

    Examples:
        >>> from mindspore_addlora import raw
        >>> raw.backends()["cpu"].available
        True
    """
    return {name: BackendInfo(*_core.backend_info(name)) for name in ("cpu", "aclnn")}


def kernel_sets() -> tuple[str, ...]:
    """The CPU kernel sets that this machine can run, best first. ``ADDLORA_ISA`` forces one of them."""
    return _core.kernel_sets()


def last_kernel_set() -> str | None:
    """The kernel set that ran in this thread's last call on the CPU, by its own report; None before any."""
    return _core.last_kernel_set()


def set_num_threads(n: int) -> None:
    """Sets the most threads that a call on the CPU uses (its own included). Results do not depend on it.

    Args:
        n (int): At least 1. The default is ``ADDLORA_NUM_THREADS``, ``OMP_NUM_THREADS`` or the number of cores that
            this process may use.

    Raises:
        ValueError: n is below 1.
        TypeError: n is not an integer.
    """
    _core.set_num_threads(n)


def get_num_threads() -> int:
    """The most threads that a call on the CPU uses."""
    return _core.get_num_threads()
