"""The cell that holds a bank of adapters and applies it."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import ml_dtypes
import numpy as np
import numpy.typing as npt
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.common.initializer import Initializer, Uniform, initializer

from .. import _bank, _core
from ..ascend import blocks as ascend_blocks
from ..ascend import ops as ascend_ops
from ..ops import add_lora, check_call

__all__ = ["AddLora"]

Array = npt.NDArray[Any]

_DTYPES = (ms.float16, ms.bfloat16, ms.float32)


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")


def _held(name: str, parts: list[Array]) -> Parameter | ParameterTuple:
    """One Parameter where the bank is one block, else a tuple of them."""
    if len(parts) == 1:
        return Parameter(Tensor(parts[0]), name=name)
    return ParameterTuple(
        Parameter(Tensor(part), name=f"{name}.{number}") for number, part in enumerate(parts)
    )


def _parameters(held: Parameter | ParameterTuple) -> tuple[Parameter, ...]:
    return (held,) if isinstance(held, Parameter) else tuple(held)


def _initial(init: Any, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """What a bank begins as. A Tensor is copied: adapters are written in place."""
    value = initializer(init, shape, dtype)
    return value.copy().astype(dtype) if isinstance(init, Tensor) else value.init_data()


class AddLora(nn.Cell):
    r"""Adds to each row of y the low-rank product of its own adapter, from a bank of adapters that the cell holds.

    .. code-block:: text

        out = y
        out[i, y_offset : y_offset + H2] += scale * (x[i] @ A[indices[i], layer_idx].T) @ B[indices[i], layer_idx].T

    The bank is two parameters, ``lora_a`` [W, L, R, H1] and ``lora_b`` [W, L, H2, R]. On Ascend it is held as the NPU
    takes it, so that a call copies no weight: in float16, with R padded by zeros to a multiple of 16; and where R is
    above 128, or W or L above 32, each of the two is a ParameterTuple of blocks (by layers, then adapters, then ranks).

    Args:
        in_features (int): H1, the columns of x.
        out_features (int): H2, the columns that are added to.
        rank (int): R, the most ranks that an adapter may have.
        num_adapters (int): W, the slots of the bank.
        num_layers (int): L, the layers that share the bank.
        y_offset (int): The first column of y that is added to.
        scale (float): A factor of every product.
        dtype (mindspore.dtype): float16, bfloat16 or float32: that of y, x and the bank.
        a_init (Union[Tensor, str, Initializer, numbers.Number], optional): What A begins as. By default uniform
            in +-1/sqrt(H1), as PEFT begins. A Tensor has A's shape and is copied.
        b_init (Union[Tensor, str, Initializer, numbers.Number]): What B begins as. Zeros: a slot that nobody wrote
            adds nothing.
        rounding (str): "float32", or "device" to predict the NPU (float16).

    Inputs:
        - **y** (Tensor) - What is added to, [B, H3] or [..., H3]. It is not changed.
        - **x** (Tensor) - [B, H1] or [..., H1], with the leading dimensions of y.
        - **indices** (Tensor) - int32 or int64, the slot of each row: [B], or one for each token, or one for each
          entry of the first dimension. A value outside [0, W) means no adapter.
        - **layer_idx** (int) - The layer of the bank. Default: 0.

    Outputs:
        Tensor, of y's shape and dtype.

    Raises:
        TypeError: An argument has the wrong type, or dtype is none of the three.
        ValueError: A size is below 1.
        AddLoraError: A call breaks a rule of the operator (a ValueError, see ``mal.raw.LIMITS``), or no call could
            keep one (a negative y_offset, rounding "device" with another dtype than float16).

    Supported Platforms:
        ``CPU`` ``Ascend`` (tested on an emulated CANN only)

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Tensor
        >>> import mindspore_addlora as mal
        >>> cell = mal.nn.AddLora(in_features=8, out_features=4, rank=2, num_adapters=3, dtype=ms.float32)
        >>> cell.set_adapter(1, np.ones((2, 8), np.float32), np.ones((4, 2), np.float32), scaling=0.5)
        >>> y = Tensor(np.zeros((2, 4), np.float32))
        >>> x = Tensor(np.ones((2, 8), np.float32))
        >>> print(cell(y, x, Tensor(np.array([1, -1], np.int32))).asnumpy()[:, 0])
        [8. 0.]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        num_adapters: int,
        num_layers: int = 1,
        *,
        y_offset: int = 0,
        scale: float = 1.0,
        dtype: Any = ms.float16,
        a_init: Tensor | str | Initializer | float | None = None,
        b_init: Tensor | str | Initializer | float = "zeros",
        rounding: str = "float32",
    ) -> None:
        super().__init__()
        _positive(
            in_features=in_features,
            out_features=out_features,
            rank=rank,
            num_adapters=num_adapters,
            num_layers=num_layers,
        )
        if dtype not in _DTYPES:
            raise TypeError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
        # The rules that hold whatever the tensors of a call are.
        name = str(dtype).lower()
        _core.check_described(
            (name, (None, None)),
            (name, (None, in_features)),
            (name, (num_adapters, num_layers, out_features, rank)),
            ("int32", (None,)),
            (name, (num_adapters, num_layers, rank, in_features)),
            0,
            y_offset,
            -1,
            "none",
            rounding,
        )
        self.in_features = in_features
        self.out_features = out_features
        self.rank = rank
        self.num_adapters = num_adapters
        self.num_layers = num_layers
        self.y_offset = y_offset
        self.scale = float(scale)
        self.rounding = rounding
        if a_init is None:
            a_init = Uniform(1.0 / math.sqrt(in_features))
        a_shape = (num_adapters, num_layers, rank, in_features)
        b_shape = (num_adapters, num_layers, out_features, rank)
        self.dtype = dtype
        self.blocks = None
        if ms.get_context("device_target") == "Ascend":
            ascend_ops.check_sizes(num_adapters, num_layers, out_features, rank, in_features, None)
            self.blocks = ascend_blocks.split(num_adapters, num_layers, rank)
        if self.blocks is None:
            self.lora_a = Parameter(_initial(a_init, a_shape, dtype), name="lora_a")
            self.lora_b = Parameter(_initial(b_init, b_shape, dtype), name="lora_b")
        else:
            a = _initial(a_init, a_shape, ms.float16)
            b = _initial(b_init, b_shape, ms.float16)
            self.lora_a = _held("lora_a", _bank.in_blocks(a.asnumpy(), self.blocks, rank_axis=2))
            self.lora_b = _held("lora_b", _bank.in_blocks(b.asnumpy(), self.blocks, rank_axis=3))

    def construct(self, y: Tensor, x: Tensor, indices: Tensor, layer_idx: int = 0) -> Tensor:
        if self.blocks is None:
            return add_lora(
                y,
                x,
                self.lora_b,
                indices,
                self.lora_a,
                layer_idx,
                self.scale,
                self.y_offset,
                -1,
                self.rounding,
            )
        b_shape = (self.num_adapters, self.num_layers, self.out_features, self.rank)
        a_shape = (self.num_adapters, self.num_layers, self.rank, self.in_features)
        check_call(
            y.dtype,
            y.shape,
            x.dtype,
            x.shape,
            self.dtype,
            b_shape,
            indices.dtype,
            indices.shape,
            self.dtype,
            a_shape,
            layer_idx,
            self.y_offset,
            -1,
            self.scale,
            self.rounding,
        )
        ascend_ops.check_sizes(
            self.num_adapters,
            self.num_layers,
            self.out_features,
            self.rank,
            self.in_features,
            y.shape[-1],
        )
        ascend_ops.check_target()
        bank_a, bank_b = self.lora_a, self.lora_b
        if len(self.blocks) == 1:
            bank_a, bank_b = (self.lora_a,), (self.lora_b,)
        return ascend_ops.add_lora_in_blocks(
            y,
            x,
            bank_b,
            indices,
            bank_a,
            self.blocks,
            self.num_adapters,
            layer_idx,
            self.scale,
            self.y_offset,
        )

    def set_adapter(
        self,
        slot: int,
        a: Array | Tensor,
        b: Array | Tensor,
        scaling: float = 1.0,
        layer_idx: int = 0,
    ) -> None:
        """Writes an adapter into a slot. Nothing recompiles, and a refused call changes nothing.

        Args:
            slot (int): In [0, W).
            a (Union[numpy.ndarray, Tensor]): [r, H1] of any float dtype, r at most R. Padded with zeros.
            b (Union[numpy.ndarray, Tensor]): [H2, r].
            scaling (float): A factor of the adapter (PEFT: lora_alpha / r), folded into b in float32.
            layer_idx (int): In [0, L).

        Raises:
            ValueError: slot, layer_idx or a shape does not fit, or a value is too large for the bank's dtype.
            TypeError: An argument has the wrong type.
        """
        self.write_adapter(slot, *self.prepare_adapter(slot, a, b, scaling, layer_idx), layer_idx)

    def prepare_adapter(
        self,
        slot: int,
        a: Array | Tensor,
        b: Array | Tensor,
        scaling: float = 1.0,
        layer_idx: int = 0,
    ) -> tuple[Array, Array]:
        """The first half of :meth:`set_adapter`: everything that can be refused, and nothing written.

        Returns:
            tuple[numpy.ndarray, numpy.ndarray], what :meth:`write_adapter` takes.
        """
        _bank.check_slot("slot", slot, self.num_adapters)
        _bank.check_slot("layer_idx", layer_idx, self.num_layers)
        return _bank.prepare_adapter(
            a,
            b,
            scaling,
            (self.rank, self.in_features),
            (self.out_features, self.rank),
            self._bank_dtype(),
        )

    def write_adapter(self, slot: int, a: Array, b: Array, layer_idx: int = 0) -> None:
        """The second half of :meth:`set_adapter`: writes what :meth:`prepare_adapter` returned."""
        _bank.wait_for_readers()
        if self.blocks is None:
            _bank.write_block(self.lora_a, slot, layer_idx, a)
            _bank.write_block(self.lora_b, slot, layer_idx, b)
            return
        _bank.write_in_blocks(_parameters(self.lora_a), self.blocks, slot, layer_idx, a, 0)
        _bank.write_in_blocks(_parameters(self.lora_b), self.blocks, slot, layer_idx, b, 1)

    def clear_adapter(self, slot: int) -> None:
        """Empties a slot in all layers: zeros, which add nothing.

        Args:
            slot (int): In [0, W).

        Raises:
            ValueError: slot is outside the bank.
            TypeError: slot is not an integer.
        """
        _bank.check_slot("slot", slot, self.num_adapters)
        a = np.zeros((self.rank, self.in_features), self._bank_dtype())
        b = np.zeros((self.out_features, self.rank), self._bank_dtype())
        for layer in range(self.num_layers):
            self.write_adapter(slot, a, b, layer)

    def read_adapter(self, slot: int, layer_idx: int = 0) -> tuple[Array, Array]:
        """A [R, H1] and B [H2, R] of a slot, padding and scaling included, as they are in the bank."""
        _bank.check_slot("slot", slot, self.num_adapters)
        _bank.check_slot("layer_idx", layer_idx, self.num_layers)
        _bank.wait_for_steps()
        if self.blocks is None:
            return (
                _bank.read_block(self.lora_a, slot, layer_idx),
                _bank.read_block(self.lora_b, slot, layer_idx),
            )
        a = np.zeros((self.rank, self.in_features), self._bank_dtype())
        b = np.zeros((self.out_features, self.rank), self._bank_dtype())
        _bank.read_from_blocks(_parameters(self.lora_a), self.blocks, slot, layer_idx, a, 0)
        _bank.read_from_blocks(_parameters(self.lora_b), self.blocks, slot, layer_idx, b, 1)
        return a, b

    def bank(self) -> tuple[Parameter, ...]:
        """The parameters that hold the bank: ``lora_a`` and ``lora_b``, or their blocks."""
        return (*_parameters(self.lora_a), *_parameters(self.lora_b))

    def _bank_dtype(self) -> np.dtype[Any]:
        """The dtype that the bank is held in, which is float16 on Ascend."""
        if self.blocks is not None or self.dtype == ms.float16:
            return np.dtype(np.float16)
        return np.dtype(np.float32 if self.dtype == ms.float32 else ml_dtypes.bfloat16)

    def extend_repr(self) -> str:
        """What print(cell) shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"num_adapters={self.num_adapters}, num_layers={self.num_layers}, y_offset={self.y_offset}, "
            f"scale={self.scale}, dtype={self.dtype}"
        )
