"""The operator as a MindSpore function: GRAPH_MODE, PyNative and ``ms.jit``, static and dynamic shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import CustomRegOp, DataType
from mindspore.ops.primitive import constexpr

from . import _core
from ._recorded import need_gradients
from .ascend import ops as ascend_ops

__all__ = ["add_lora"]

# numpy arrays are refused too, by their dtype, in words of their own.
_TENSORS = (Tensor, np.ndarray)
_SCALARS = ("layer_idx", "scale", "y_offset", "device_rounding")


def _registered(function: str, tensors: tuple[str, ...]) -> dict[str, Any]:
    """What ``ops.Custom`` is told of a function of the core."""
    # Every argument is registered, scalars included: dynamic shapes need it.
    inputs = tensors + _SCALARS
    registration = CustomRegOp(function)
    for position, name in enumerate(inputs):
        registration.input(position, name)
    registration.output(0, "out").dtype_format(*[DataType.None_None] * (len(inputs) + 1)).target(
        "CPU"
    )
    return {
        "func": f"{_core.__file__}:{function}",
        "out_shape": None,  # inferred by the library's own <function>InferShape
        "out_dtype": lambda y, *_: y,
        "func_type": "aot",
        "reg_info": registration.get_op_info(),
    }


def _custom_op(function: str, tensors: tuple[str, ...], bprop: Any = None) -> ops.Custom:
    return ops.Custom(**_registered(function, tensors), bprop=bprop)


_NAMES = ("y", "x", "weight_b", "indices", "weight_a")

# One operator for each gradient, so that a graph runs those that somebody asked for; cpp/gradients.hpp has the formulas.
# Each takes the gradient of the result in y's place.
_grad_x = _custom_op("AddLoraGradX", _NAMES)
_grad_weight_a = _custom_op("AddLoraGradWeightA", _NAMES)
_grad_weight_b = _custom_op("AddLoraGradWeightB", _NAMES)
_expand_grad_x = _custom_op("AddLoraExpandGradX", _NAMES[:4])
_expand_grad_weight_b = _custom_op("AddLoraExpandGradWeightB", _NAMES[:4])


def _gradients(
    y: Tensor,
    x: Tensor,
    weight_b: Tensor,
    indices: Tensor,
    weight_a: Tensor,
    layer_idx: int,
    scale: float,
    y_offset: int,
    device_rounding: int,
    out: Tensor,
    dout: Tensor,
) -> tuple[Any, ...]:
    dx = _grad_x(dout, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, 0)
    da = _grad_weight_a(dout, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, 0)
    db = _grad_weight_b(dout, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, 0)
    return dout, dx, db, ops.zeros_like(indices), da, 0, 0, 0, 0


def _expand_gradients(
    y: Tensor,
    x: Tensor,
    weight_b: Tensor,
    indices: Tensor,
    layer_idx: int,
    scale: float,
    y_offset: int,
    device_rounding: int,
    out: Tensor,
    dout: Tensor,
) -> tuple[Any, ...]:
    dx = _expand_grad_x(dout, x, weight_b, indices, layer_idx, scale, y_offset, 0)
    db = _expand_grad_weight_b(dout, x, weight_b, indices, layer_idx, scale, y_offset, 0)
    return dout, dx, db, ops.zeros_like(indices), 0, 0, 0, 0


def _add_lora_recorded(need_x: bool, need_b: bool, need_a: bool) -> ops.Custom:
    """The operator for PyNative with the gradients that are needed, among those above."""

    def gradients(*call: Any) -> tuple[Any, ...]:
        _, *operands, _, _, dout = call  # without y, the rounding and the result
        dx = _grad_x(dout, *operands, 0) if need_x else None
        db = _grad_weight_b(dout, *operands, 0) if need_b else None
        da = _grad_weight_a(dout, *operands, 0) if need_a else None
        return dout, dx, db, None, da, 0, 0, 0, 0

    return _custom_op("AddLora", _NAMES, gradients)


def _add_lora_expand_recorded(need_x: bool, need_b: bool) -> ops.Custom:
    """The same without weight_a."""

    def gradients(*call: Any) -> tuple[Any, ...]:
        _, *operands, _, _, dout = call
        dx = _expand_grad_x(dout, *operands, 0) if need_x else None
        db = _expand_grad_weight_b(dout, *operands, 0) if need_b else None
        return dout, dx, db, None, 0, 0, 0, 0

    return _custom_op("AddLoraExpand", _NAMES[:4], gradients)


class _Operator(ops.Custom):
    """An operator whose PyNative calls record only the gradients that they need.

    Graphs do not come here: they compile the operator itself, with all gradients, and drop those that nobody uses.
    """

    def __init__(
        self,
        function: str,
        tensors: tuple[str, ...],
        bprop: Any,
        recorded: Callable[..., ops.Custom],
    ) -> None:
        super().__init__(**_registered(function, tensors), bprop=bprop)
        self._recorded = functools.cache(recorded)

    def __call__(self, y: Tensor, x: Tensor, weight_b: Tensor, indices: Tensor, *rest: Any) -> Any:
        weight_a = [tensor for tensor in rest[:1] if isinstance(tensor, Tensor)]
        operator = self._recorded(*need_gradients(x, weight_b, *weight_a))
        return operator(y, x, weight_b, indices, *rest)


_add_lora = _Operator("AddLora", _NAMES, _gradients, _add_lora_recorded)
_add_lora_expand = _Operator(
    "AddLoraExpand", _NAMES[:4], _expand_gradients, _add_lora_expand_recorded
)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("Tensor[").removesuffix("]").lower()


def _describe(dtype: Any, shape: Any) -> tuple[str, tuple[int | None, ...]]:
    return _dtype_name(dtype), tuple(None if n is None or n < 0 else n for n in shape)


@constexpr
def check_tensors(missing: tuple[bool, ...], tensors: tuple[bool, ...]) -> bool:
    """Refuses what is None or no tensor, where the call would only fail at ``y.dtype``."""
    names = ("y", "x", "weight_b", "indices", "weight_a")
    for name, is_missing, is_tensor in zip(names, missing, tensors, strict=True):
        if is_missing and name != "weight_a":
            _core.refuse_missing(name)
        if not is_missing and not is_tensor:
            raise TypeError(f"{name}: expected a Tensor, got another type")
    return True


@constexpr
def check_call(
    y_dtype: Any,
    y_shape: Any,
    x_dtype: Any,
    x_shape: Any,
    b_dtype: Any,
    b_shape: Any,
    indices_dtype: Any,
    indices_shape: Any,
    a_dtype: Any,
    a_shape: Any,
    layer_idx: Any,
    y_offset: Any,
    y_slice_size: Any,
    scale: Any,
    rounding: Any,
) -> bool:
    """Asks the core's rules, in Python while a graph is compiled: nothing has run yet, and a refusal harms nothing.

    What the compiler does not know yet (a dynamic dimension, a mutable scalar) arrives as None and is left to the
    kernel.
    """
    for name, value in (
        ("layer_idx", layer_idx),
        ("y_offset", y_offset),
        ("y_slice_size", y_slice_size),
    ):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, np.integer))
        ):
            raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, (int, float, np.floating))
    ):
        raise TypeError(f"scale: expected a real number, got {type(scale).__name__}")
    if isinstance(scale, int) and not -(2**63) <= scale < 2**63:
        raise OverflowError(f"scale: expected a float or a 64-bit integer, got {scale}")
    if y_shape is None or x_shape is None or b_shape is None or indices_shape is None:
        return True  # not even the rank is known
    for name, dtype in (
        ("y", y_dtype),
        ("x", x_dtype),
        ("weight_b", b_dtype),
        ("indices", indices_dtype),
        ("weight_a", a_dtype),
    ):
        if isinstance(dtype, np.dtype):
            raise TypeError(
                f"{name}: expected a Tensor, got a numpy.ndarray (mal.raw.add_lora takes those)"
            )
    if all(n is not None and n >= 0 for n in y_shape):
        # A scalar that only the kernel sees could be refused only there, and that would end the compiled model. With
        # dynamic shapes it is taken all the same: there one compiled graph is meant to serve every value.
        for name, value in (("layer_idx", layer_idx), ("y_offset", y_offset)):
            if value is None:
                raise TypeError(
                    f"{name}: expected a constant with static shapes, got a mutable value"
                )
    if y_slice_size is None:
        raise TypeError(
            "y_slice_size: expected a constant, got a value that is not known when the graph is compiled"
        )
    _core.check_described(
        _describe(y_dtype, y_shape),
        _describe(x_dtype, x_shape),
        _describe(b_dtype, b_shape),
        _describe(indices_dtype, indices_shape),
        None if a_shape is None else _describe(a_dtype, a_shape),
        0 if layer_idx is None else layer_idx,
        0 if y_offset is None else y_offset,
        y_slice_size,
        "none",
        rounding,
    )
    return True


def add_lora(
    y: Tensor,
    x: Tensor,
    weight_b: Tensor,
    indices: Tensor,
    weight_a: Tensor | None = None,
    layer_idx: int = 0,
    scale: float = 1.0,
    y_offset: int = 0,
    y_slice_size: int = -1,
    rounding: str = "float32",
) -> Tensor:
    r"""Adds to each row of y the low-rank product of its own adapter.

    .. code-block:: text

        out = y
        out[i, y_offset : y_offset + H2] += scale * (x[i] @ A[indices[i], layer_idx].T) @ B[indices[i], layer_idx].T

    A row whose index is not in [0, W) has no adapter: its row of the result is y's, bit for bit. y is never changed.
    With ``weight_a=None`` the first product is left out and x is [B, R].

    Args:
        y (Tensor): What is added to, [B, H3] or with more leading dimensions, [..., H3]. float16, bfloat16 or
            float32, and so are x and the weights.
        x (Tensor): [B, H1] or [..., H1], with the leading dimensions of y; [..., R] without weight_a.
        weight_b (Tensor): [W, L, H2, R], the B of W adapters in L layers.
        indices (Tensor): int32 or int64, the adapter of each row: [B], or one for each token in the shape of the
            leading dimensions or flat, or one for each entry of the first dimension.
        weight_a (Tensor, optional): [W, L, R, H1], the A of each adapter.
        layer_idx (int): The layer whose weights are used, below L.
        scale (float): A factor of every product.
        y_offset (int): The first column that is added to.
        y_slice_size (int): -1 or H2.
        rounding (str): "float32" computes in float32 and rounds once, at the end; "device" (float16) rounds where
            the NPU does.

    Returns:
        Tensor, of y's shape and dtype.

    Raises:
        AddLoraError: A rule was broken (a ValueError with a ``code``). It is raised before anything runs: at the
            call in PyNative mode, at compile time in a graph. With dynamic shapes, what only the data shows is a
            RuntimeError of MindSpore's, whose message names the argument.
        TypeError: A scalar is not of the type above.

    Supported Platforms:
        ``CPU`` ``Ascend`` (tested on an emulated CANN only)

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor
        >>> import mindspore_addlora as mal
        >>> y = Tensor(np.zeros((3, 4), np.float32))
        >>> x = Tensor(np.ones((3, 8), np.float32))
        >>> a = Tensor(np.ones((2, 1, 2, 8), np.float32))  # [W=2, L=1, R=2, H1=8]
        >>> b = Tensor(np.ones((2, 1, 4, 2), np.float32))  # [W, L, H2=4, R]
        >>> out = mal.add_lora(y, x, b, Tensor(np.array([1, -1, 0], np.int32)), a, scale=0.5)
        >>> print(out.asnumpy()[:, 0])
        [8. 0. 8.]
    """
    check_tensors(
        (y is None, x is None, weight_b is None, indices is None, weight_a is None),
        (
            isinstance(y, _TENSORS),
            isinstance(x, _TENSORS),
            isinstance(weight_b, _TENSORS),
            isinstance(indices, _TENSORS),
            isinstance(weight_a, _TENSORS),
        ),
    )
    if isinstance(layer_idx, np.integer):  # MindSpore's operators take few of numpy's integers
        layer_idx = int(layer_idx)
    if isinstance(y_offset, np.integer):
        y_offset = int(y_offset)
    a_dtype, a_shape = None, None
    if weight_a is not None:
        a_dtype, a_shape = weight_a.dtype, weight_a.shape
    check_call(
        y.dtype,
        y.shape,
        x.dtype,
        x.shape,
        weight_b.dtype,
        weight_b.shape,
        indices.dtype,
        indices.shape,
        a_dtype,
        a_shape,
        layer_idx,
        y_offset,
        y_slice_size,
        scale,
        rounding,
    )
    if ascend_ops.available():
        return ascend_ops.add_lora(y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset)
    device_rounding = int(rounding == "device")
    if weight_a is None:
        return _add_lora_expand(
            y, x, weight_b, indices, layer_idx, scale, y_offset, device_rounding
        )
    return _add_lora(y, x, weight_b, indices, weight_a, layer_idx, scale, y_offset, device_rounding)
