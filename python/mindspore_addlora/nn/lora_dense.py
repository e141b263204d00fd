"""A dense cell with a bank of adapters beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.ops.primitive import constexpr

from .. import _bank
from ..ascend.ops import rows_of
from .add_lora import AddLora

__all__ = ["LoraDense", "Route"]

Array = npt.NDArray[Any]
Matrix: TypeAlias = Array | Tensor
Prepared: TypeAlias = list[tuple[AddLora, Array, Array] | None]


_ROUTES = itertools.count()


class Route:
    """Which slot each row uses, for every cell of a model: -1 for no adapter.

    Args:
        max_rows (int): The most rows that can be routed.
        prefix (str): What the parameters' names begin with.
    """

    def __init__(self, max_rows: int, prefix: str = "") -> None:
        self.max_rows = max_rows
        # One slot for each row of the batch; and the same for each token, for models that flatten their batch.
        none = np.full(max_rows, -1, np.int32)
        number = next(_ROUTES)  # two models may meet in one graph, where names must differ
        self.rows, self.tokens = (
            Parameter(Tensor(none), name=f"{prefix}route_{kind}_{number}", requires_grad=False)
            for kind in ("rows", "tokens")
        )

    def write(self, slots: Sequence[int], tokens_per_row: int) -> None:
        """Routes the rows; those past the end have no adapter."""
        for parameter, values in (
            (self.rows, np.asarray(slots, np.int32)),
            (self.tokens, np.repeat(np.asarray(slots, np.int32), tokens_per_row)),
        ):
            whole = np.full(self.max_rows, -1, np.int32)
            whole[: len(values)] = values
            _bank.write_whole(parameter, whole)


class Slice(NamedTuple):
    """Columns of a fused projection that have an adapter of their own."""

    offset: int
    size: int


@constexpr
def _fits(count: int | None, largest: int) -> bool:
    """Whether a number of rows is known when the graph is compiled, and can be routed."""
    return count is not None and 0 <= count <= largest


def _check_slices(slices: Sequence[tuple[int, int]] | None, out_features: int) -> list[Slice]:
    if slices is None:
        return [Slice(0, out_features)]
    checked = [Slice(int(offset), int(size)) for offset, size in slices]
    end = 0
    for number, (offset, size) in enumerate(checked):
        if size < 1 or offset < end or offset + size > out_features:
            raise ValueError(
                f"slices: expected (offset, size) in order, apart, and within {out_features} columns, got "
                f"{tuple(checked[number])} at {number}"
            )
        end = offset + size
    if not checked:
        raise ValueError("slices: expected at least one, or None")
    return checked


class LoraDense(nn.Cell):
    r"""A dense cell with a bank of adapters beside it: every row of the batch may use another adapter, or none.

    .. code-block:: text

        y = x @ weight.T + bias
        y[i, offset : offset + size] += scaling * (x[i] @ A[indices[i]].T) @ B[indices[i]].T    for each slice
        activation(y)

    Args:
        base (Union[mindspore.nn.Dense, mindspore.mint.nn.Linear]): The cell, whose parameters are neither copied nor
            changed, and keep their names. Its activation moves here, to come after the adapters; :meth:`unwrap` gives it
            back.
        rank (int): R, the most ranks that an adapter may have (for each slice).
        num_adapters (int): W, the slots of the bank.
        slices (Sequence[tuple[int, int]], optional): (offset, size) of the parts of a fused projection, each with an
            adapter of its own: ``[(0, 64), (64, 32), (96, 32)]`` for q, k and v. Default: ``None``, one for all columns.
        dtype (mindspore.dtype, optional): That of the bank. Default: ``None``, the base weight's. Where the cell computes
            in another one (``to_float`` too), x is cast, and the products are summed apart and then added.
        route (Route, optional): The rows' slots, where a model routes them (``MultiLora``).

    Inputs:
        - **x** (Tensor) - [B, H1] or [..., H1].
        - **indices** (Tensor, optional) - int32 or int64, the slot of each row: [B], or one for each token, or one for
          each entry of the first dimension; outside [0, W): no adapter. Default: ``None``, the rows that
          ``MultiLora`` routed.

    Outputs:
        Tensor, [..., H2].

    Raises:
        TypeError: base is neither of the two cells.
        ValueError: A size is below 1, the slices overlap or leave the columns, or there are no indices and no route.
        AddLoraError: A call breaks a rule of the operator (a ValueError, see ``mal.raw.LIMITS``).

    Supported Platforms:
        ``CPU`` ``Ascend`` (tested on an emulated CANN only)

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> import mindspore_addlora as mal
        >>> cell = mal.nn.LoraDense(nn.Dense(8, 4, weight_init="ones", has_bias=False), rank=2, num_adapters=3)
        >>> cell.set_adapter(1, np.ones((2, 8), np.float32), np.ones((4, 2), np.float32), scaling=0.5)
        >>> x = Tensor(np.ones((2, 8), np.float32))
        >>> print(cell(x, Tensor(np.array([1, -1], np.int32))).asnumpy()[:, 0])
        [16.  8.]
    """

    def __init__(
        self,
        base: nn.Cell,
        rank: int,
        num_adapters: int,
        slices: Sequence[tuple[int, int]] | None = None,
        *,
        dtype: Any = None,
        route: Route | None = None,
        a_init: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(base, (nn.Dense, mint.nn.Linear)):
            raise TypeError(
                f"base: expected an nn.Dense or a mint.nn.Linear, got {type(base).__name__}"
            )
        out_features, in_features = base.weight.shape
        self.slices = _check_slices(slices, out_features)
        dtype = base.weight.dtype if dtype is None else dtype
        self.dtype = dtype
        cells = [
            AddLora(
                in_features,
                size,
                rank,
                num_adapters,
                y_offset=offset,
                dtype=dtype,
                a_init=a_init,
            )
            for offset, size in self.slices
        ]
        # Neither the base nor the banks are children, but their parameters are this cell's own: so weight and bias are
        # called what they were called before, wherever in a model this cell hangs.
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "loras", tuple(cells))
        self.weight = base.weight
        if base.bias is not None:
            self.bias = base.bias
        for number, cell in enumerate(cells):
            ending = "" if slices is None else f"_{number}"
            for parameter in cell.bank():
                parameter.name += ending
            setattr(self, f"lora_a{ending}", cell.lora_a)
            setattr(self, f"lora_b{ending}", cell.lora_b)
        self.in_features = in_features
        self.out_features = out_features
        self.rank = rank
        self.num_adapters = num_adapters
        self.is_sliced = slices is not None
        self.max_rows = 0 if route is None else route.max_rows
        self._hold_route("route", route)
        self._hold_route("trained", None)
        object.__setattr__(self, "trained", ())
        # The adapters come before it. The flag may be down already: a base can be shared.
        self.activation = getattr(base, "activation", None)
        if self.activation is not None:
            base.activation_flag = False

    def _hold_route(self, name: str, route: Route | None) -> None:
        """Holds a route's parameters, but not as the model's: a checkpoint of the model would bring back rows that nobody
        routed. As attributes of this cell all the same: through another object a graph takes them for constants."""
        for kind in ("rows", "tokens"):
            parameter = None if route is None else getattr(route, kind)
            object.__setattr__(self, f"{name}_{kind}", parameter)

    def construct(self, x: Tensor, indices: Tensor | None = None) -> Tensor:
        y = self.base(x)
        is_vector = x.ndim == 1
        if is_vector:
            x, y = ops.reshape(x, (1, -1)), ops.reshape(y, (1, -1))
        slots = self._routed(x) if indices is None else indices
        y = self._adapted(self.loras, y, x, slots)
        if self.trained_rows is not None:
            trained_slots = self._among(x, self.trained_rows, self.trained_tokens)
            y = self._adapted(self.trained, y, x, trained_slots)
        if is_vector:
            y = ops.reshape(y, (-1,))
        if self.activation is not None:
            y = self.activation(y)
        return y

    def _adapted(self, loras: tuple[AddLora, ...], y: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """y with the products of a bank, computed in the bank's dtype."""
        if x.dtype != self.dtype:
            x = ops.cast(x, self.dtype)
        if y.dtype == self.dtype:
            for lora in loras:
                y = lora(y, x, slots)
            return y
        total = ops.cast(ops.zeros_like(y), self.dtype)
        for lora in loras:
            total = lora(total, x, slots)
        rows = ops.reshape(rows_of(slots, y), y.shape[:-1] + (1,))
        has_adapter = ops.logical_and(rows >= 0, rows < loras[0].num_adapters)
        added = ops.cast(ops.cast(y, ms.float32) + ops.cast(total, ms.float32), y.dtype)
        # Chosen, not added: -0 + 0 is 0, and a NaN that takes part in an addition is another one.
        return ops.select(has_adapter, added, y)

    def _routed(self, x: Tensor) -> Tensor:
        """The routed slots of x's rows: of its tokens, where the batch has been flattened."""
        if self.route_rows is None:
            raise ValueError(
                "indices: expected a Tensor, as no MultiLora routes this cell, got None"
            )
        return self._among(x, self.route_rows, self.route_tokens)

    def _among(self, x: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        slots = tokens if x.ndim == 2 else rows
        count = x.shape[0]
        if _fits(count, self.max_rows):
            return slots[:count]
        # More rows than can be routed, or a number that only the data shows.
        row = ops.arange(count)
        routed = ops.gather(slots, ops.minimum(row, self.max_rows - 1), 0)
        return ops.select(row < self.max_rows, routed, ops.full_like(routed, -1))

    def set_adapter(
        self,
        slot: int,
        a: Matrix | Sequence[Matrix | None],
        b: Matrix | Sequence[Matrix | None],
        scaling: float | Sequence[float] = 1.0,
    ) -> None:
        """Writes an adapter into a slot. Nothing recompiles, and a refused call changes nothing.

        Args:
            slot (int): In [0, W).
            a (Union[numpy.ndarray, Tensor, Sequence]): [r, H1] of any float dtype, r at most R. With slices one for
                each, None for a slice without an adapter.
            b (Union[numpy.ndarray, Tensor, Sequence]): [H2, r]. With slices [size, r] for each, None where a is.
            scaling (Union[float, Sequence[float]]): A factor of the adapter (PEFT: lora_alpha / r), or one for each
                slice.

        Raises:
            ValueError: slot or a shape does not fit, or a value is too large for the bank's dtype.
            TypeError: An argument has the wrong type.
        """
        self.write_adapter(slot, self.prepare_adapter(slot, a, b, scaling))

    def prepare_adapter(
        self,
        slot: int,
        a: Matrix | Sequence[Matrix | None],
        b: Matrix | Sequence[Matrix | None],
        scaling: float | Sequence[float] = 1.0,
    ) -> Prepared:
        """The first half of :meth:`set_adapter`: everything that can be refused, and nothing written."""
        _bank.check_slot("slot", slot, self.num_adapters)
        count = len(self.slices)
        parts = []
        for name, given in (("a", a), ("b", b)):
            value: Any = given if self.is_sliced else [given]
            if not isinstance(value, (list, tuple)) or len(value) != count:
                got = len(value) if isinstance(value, (list, tuple)) else type(value).__name__
                raise ValueError(
                    f"{name}: expected a list of {count}, one for each slice, got {got}"
                )
            parts.append(value)
        scalings = scaling if isinstance(scaling, (list, tuple)) else [scaling] * count
        if len(scalings) != count:
            raise ValueError(
                f"scaling: expected one for each of {count} slices, got {len(scalings)}"
            )
        prepared: Prepared = []
        for number, cell in enumerate(self.loras):
            one_a, one_b = parts[0][number], parts[1][number]
            if (one_a is None) != (one_b is None):
                raise ValueError(f"a, b: expected both or neither to be None for slice {number}")
            if one_a is None:
                prepared.append(None)
                continue
            try:
                blocks = cell.prepare_adapter(slot, one_a, one_b, scalings[number])
            except ValueError as error:
                raise ValueError(
                    f"slice {number}: {error}" if self.is_sliced else str(error)
                ) from None
            prepared.append((cell, *blocks))
        return prepared

    def write_adapter(self, slot: int, prepared: Prepared) -> None:
        """The second half of :meth:`set_adapter`: writes what :meth:`prepare_adapter` returned; a slice without an
        adapter is emptied."""
        for cell, part in zip(self.loras, prepared, strict=True):
            if part is None:
                cell.clear_adapter(slot)
            else:
                cell.write_adapter(slot, part[1], part[2])

    def clear_adapter(self, slot: int) -> None:
        """Empties a slot: zeros, which add nothing.

        Args:
            slot (int): In [0, W).

        Raises:
            ValueError: slot is outside the bank.
            TypeError: slot is not an integer.
        """
        _bank.check_slot("slot", slot, self.num_adapters)
        for cell in self.loras:
            cell.clear_adapter(slot)

    def start_training(self, slots: Sequence[int], route: Route) -> tuple[Parameter, ...]:
        """Copies adapters into a bank of their own, with trainable parameters, which `route` gives rows to. The bank that
        they come from stays frozen, so that whatever an optimizer does cannot reach other adapters."""
        trained = []
        for number, cell in enumerate(self.loras):
            copy = AddLora(
                cell.in_features,
                cell.out_features,
                cell.rank,
                len(slots),
                y_offset=cell.y_offset,
                dtype=cell.dtype,
                a_init="zeros",
            )
            for position, slot in enumerate(slots):
                copy.write_adapter(position, *cell.read_adapter(slot))
            ending = f"_{number}" if self.is_sliced else ""
            for parameter in copy.bank():
                parameter.name = f"trained_{parameter.name}{ending}"
            setattr(self, f"trained_a{ending}", copy.lora_a)
            setattr(self, f"trained_b{ending}", copy.lora_b)
            trained.append(copy)
        object.__setattr__(self, "trained", tuple(trained))
        self._hold_route("trained", route)
        return tuple(parameter for cell in trained for parameter in cell.bank())

    def store_trained(self, slots: Sequence[int]) -> None:
        """Copies what was trained into the slots that it came from."""
        for cell, copy in zip(self.loras, self.trained, strict=True):
            for position, slot in enumerate(slots):
                cell.write_adapter(slot, *copy.read_adapter(position))

    def end_training(self) -> None:
        """Lets go of the bank that was trained."""
        for number in range(len(self.trained)):
            ending = f"_{number}" if self.is_sliced else ""
            delattr(self, f"trained_a{ending}")
            delattr(self, f"trained_b{ending}")
        object.__setattr__(self, "trained", ())
        self._hold_route("trained", None)

    def add_flags_recursive(self, **flags: Any) -> nn.Cell:
        """Flags, such as those of ``to_float``, are the base's too, which is no child here."""
        super().add_flags_recursive(**flags)
        self.base.add_flags_recursive(**flags)
        return self

    def bank(self) -> tuple[Parameter, ...]:
        """The parameters that hold the adapters."""
        return tuple(parameter for cell in self.loras for parameter in cell.bank())

    def unwrap(self) -> nn.Cell:
        """The base cell as it was, with its activation."""
        if self.activation is not None:
            self.base.activation_flag = True
        return self.base

    def extend_repr(self) -> str:
        """What print(cell) shows."""
        slices = f", slices={[tuple(part) for part in self.slices]}" if self.is_sliced else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"num_adapters={self.num_adapters}{slices}"
        )
