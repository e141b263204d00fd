"""Many PEFT adapters on one model, by name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn

from . import _bank, _places, peft
from .nn.lora_dense import LoraDense, Prepared, Route

__all__ = ["AdapterInfo", "MultiLora"]

TABLE_FILE = "multi_lora.json"
BANKS_FILE = "multi_lora.ckpt"


@dataclass(frozen=True)
class AdapterInfo:
    """What is known of a loaded adapter.

    Args:
        slot (int): Its slot in every bank.
        path (str): The folder that it was read from; empty where it was created here.
        rank (int): The largest rank of its modules.
        modules (Mapping[str, tuple[int, float]]): Rank and scaling of each module, by the adapter's own names.
        config (Mapping[str, Any]): Its ``adapter_config.json``.
    """

    slot: int
    path: str
    rank: int
    modules: Mapping[str, tuple[int, float]]
    config: Mapping[str, Any]


class _Target:
    """An attached cell, and the names that adapters know it or its parts by."""

    def __init__(self, path: str, cell: LoraDense, parts: tuple[str, ...], stacked: bool) -> None:
        self.path = path
        self.cell = cell
        self.parts = parts
        # The parts of a fused projection whose sizes nobody said: their adapters are stacked along the rank.
        self.stacked = stacked
        self.sizes: dict[str, int] = {}
        # As they are now: a model that becomes part of another is renamed.
        self.bank_names = [parameter.name for parameter in cell.bank()]

    def prepare(
        self, slot: int, modules: Mapping[str, peft.LoraWeights]
    ) -> tuple[Prepared, dict[str, int]]:
        """What is to be written for an adapter, and what its shapes say of the parts' sizes."""
        given = [modules.get(part) for part in self.parts]
        if not self.stacked:
            a = [None if one is None else one.a for one in given]
            b = [None if one is None else one.b for one in given]
            scaling = [1.0 if one is None else one.scaling for one in given]
            if self.cell.is_sliced:
                return self.cell.prepare_adapter(slot, a, b, scaling), {}
            return self.cell.prepare_adapter(slot, a[0], b[0], scaling[0]), {}
        sizes = self._sizes(modules)
        total = self.cell.out_features
        rank = sum(one.rank for one in given if one is not None)
        stacked_a = np.zeros((rank, self.cell.in_features), np.float32)
        stacked_b = np.zeros((total, rank), np.float32)
        at = 0
        for part, one in zip(self.parts, given, strict=True):
            if one is None:
                continue
            if one.a.shape[1] != self.cell.in_features:
                raise ValueError(
                    f"a of {part}: expected [r, {self.cell.in_features}], got shape {list(one.a.shape)}"
                )
            offset = self._offset(part, sizes)
            stacked_a[at : at + one.rank] = _bank.to_float32("a", one.a)
            rows = slice(offset, offset + one.b.shape[0])
            stacked_b[rows, at : at + one.rank] = _bank.to_float32("b", one.b) * np.float32(
                one.scaling
            )
            at += one.rank
        return self.cell.prepare_adapter(slot, stacked_a, stacked_b), sizes

    def _sizes(self, modules: Mapping[str, peft.LoraWeights]) -> dict[str, int]:
        """The rows of each part, as far as this adapter, earlier ones and the whole say."""
        sizes = dict(self.sizes)
        for part in self.parts:
            if part in modules:
                rows = modules[part].b.shape[0]
                if sizes.setdefault(part, rows) != rows:
                    raise ValueError(
                        f"b of {part}: expected {sizes[part]} rows, as an earlier adapter has, got {rows}"
                    )
        missing = [part for part in self.parts if part not in sizes]
        rest = self.cell.out_features - sum(sizes.values())
        if len(missing) == 1 and rest > 0:
            sizes[missing[0]] = rest
        elif rest < len(missing) or (not missing and rest != 0):
            raise ValueError(
                f"{self.path}: expected parts of {self.cell.out_features} rows in all, got {sizes}"
            )
        return sizes

    def _offset(self, part: str, sizes: Mapping[str, int]) -> int:
        total: int = self.cell.out_features
        number = self.parts.index(part)
        before, after = self.parts[:number], self.parts[number:]
        if all(one in sizes for one in before):
            return sum(sizes[one] for one in before)
        if all(one in sizes for one in after):
            return total - sum(sizes[one] for one in after)
        unknown = [one for one in self.parts if one not in sizes]
        raise ValueError(
            f"{self.path}: where {part} lies cannot be told without the rows of {', '.join(unknown)}; give them: "
            'packed_modules={"...": {"name": rows, ...}}'
        )


class MultiLora:
    r"""Many PEFT adapters on one model: each row of a batch uses the adapter that :meth:`route` gives it, or none.

    The model's matching dense cells are swapped for :class:`LoraDense`, which hold one bank each; base weights are not
    copied or changed and keep their names. The model is called as ever. Loading, deleting and routing compile nothing.

    Args:
        model (mindspore.nn.Cell): The model. Attach before it is wrapped in another cell that has been compiled.
        target_modules (Union[Sequence[str], str]): The dense cells to attach to, as in PEFT: paths or ends of paths, or
            a regular expression for the whole path, or "all-linear". A fused projection is named by its own name.
        max_rank (int): The highest rank of an adapter.
        num_adapters (int): How many adapters can be loaded at a time.
        max_rows (int): The most rows (with tokens_per_row: tokens) that can be routed. Default: ``65536``.
        packed_modules (Mapping, optional): The projections that a fused cell holds, in the order of their rows:
            ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``, or with their rows,
            ``{"qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32}}``, which makes a smaller bank and a faster
            product: without them the parts' adapters are stacked along the rank of one bank.
        rename (Union[Callable, Mapping], optional): From a path in the model to the name that adapters know it by: a
            function, or a mapping of regular expressions to replacements, applied in order.
        dtype (mindspore.dtype, optional): The banks' dtype. Default: ``None``, each base weight's.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A name in target_modules or packed_modules matches no dense cell, or a cell has adapters already.

    Supported Platforms:
        ``CPU`` ``Ascend`` (tested on an emulated CANN only)

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> import mindspore_addlora as mal
        >>> class Model(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.q_proj = nn.Dense(8, 4, weight_init="ones", has_bias=False)
        ...     def construct(self, x):
        ...         return self.q_proj(x)
        >>> folder = tempfile.mkdtemp()
        >>> weights = mal.peft.LoraWeights(np.ones((2, 8), np.float32), np.ones((4, 2), np.float32), 0.5, 2)
        >>> mal.peft.write_adapter(folder, {"q_proj": weights})
        >>> model = Model()
        >>> lora = mal.MultiLora(model, target_modules=["q_proj"], max_rank=4, num_adapters=2)
        >>> lora.load_adapter(folder, "legal")
        >>> lora.route(["legal", None])
        >>> print(model(Tensor(np.ones((2, 8), np.float32))).asnumpy()[:, 0])
        [16.  8.]
    """

    def __init__(
        self,
        model: nn.Cell,
        target_modules: Sequence[str] | str,
        max_rank: int,
        num_adapters: int,
        max_rows: int = 65536,
        *,
        packed_modules: Mapping[str, Sequence[str] | Mapping[str, int]] | None = None,
        rename: Callable[[str], str] | Mapping[str, str] | None = None,
        dtype: Any = None,
    ) -> None:
        if not isinstance(model, nn.Cell):
            raise TypeError(f"model: expected an nn.Cell, got {type(model).__name__}")
        for name, value in (
            ("max_rank", max_rank),
            ("num_adapters", num_adapters),
            ("max_rows", max_rows),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self._model = model
        self._max_rank = max_rank
        self._num_adapters = num_adapters
        self._packed = _places.packed_parts(packed_modules)
        self._rename = _places.renaming(rename)
        self._adapters: dict[str, AdapterInfo] = {}
        self._routed: tuple[str | None, ...] = ()
        self._tokens_per_row = 1
        self._trained: tuple[str, ...] = ()
        self._trained_route: Route | None = None
        self._lock = threading.RLock()
        self._attached = True

        places = list(_places.dense_places(model))
        chosen = _places.choose(places, target_modules)
        unused = set(self._packed) - {place.path.rpartition(".")[2] for place in chosen}
        if unused:
            raise ValueError(
                f"packed_modules: expected names of cells in target_modules, got {', '.join(sorted(unused))}"
            )
        self._dense_names = self._all_names(places, chosen)
        self._route = Route(max_rows, f"{chosen[0].path}.")
        self._places = chosen
        self._targets: list[_Target] = []
        try:
            for place in chosen:
                self._wrap(place, dtype)
        except BaseException:
            for target in self._targets:
                target.cell.unwrap()
            raise
        for place, target in zip(chosen, self._targets, strict=True):
            _places.replace(place, target.cell)
        _places.forget_graphs(model)

    def _wrap(self, place: _places.Place, dtype: Any) -> None:
        parts = self._packed.get(place.path.rpartition(".")[2], {})
        slices, rank = None, self._max_rank
        stacked = None in parts.values()
        if stacked:
            rank *= len(parts)
        elif parts:
            sizes = [size for size in parts.values() if size is not None]
            out_features = place.cell.weight.shape[0]
            if sum(sizes) != out_features:
                raise ValueError(
                    f"packed_modules: expected the {out_features} rows of {place.path} in all, got {parts}"
                )
            slices = [(sum(sizes[:number]), size) for number, size in enumerate(sizes)]
        cell = LoraDense(
            place.cell,
            rank,
            self._num_adapters,
            slices,
            dtype=dtype,
            route=self._route,
            a_init="zeros",
        )
        for parameter in cell.bank():
            # The full path, as MindSpore names a model's parameters: short names would meet in a compiled graph.
            parameter.name = f"{place.path}.{parameter.name}"
            parameter.requires_grad = False
        self._targets.append(_Target(place.path, cell, self._names(place.path), stacked))

    def _all_names(
        self, places: Sequence[_places.Place], chosen: Sequence[_places.Place]
    ) -> dict[str, list[str]]:
        """Every name that an adapter may have for a dense cell of this model, attached or not, with all names of that
        cell: a shared one has several."""
        attached = {place.path for place in chosen}
        owners: dict[str, str] = {}
        of_cell: dict[tuple[int, int], list[str]] = {}
        found = {}
        for place in places:
            for part, name in enumerate(self._names(place.path)):
                owner = owners.setdefault(name, place.path)
                if owner != place.path and not attached.isdisjoint((owner, place.path)):
                    raise ValueError(
                        f"packed_modules, rename: expected another name for each dense cell, got {name!r} for {owner} and "
                        f"{place.path}"
                    )
                found[name] = of_cell.setdefault((id(place.cell), part), [])
                found[name].append(name)
        return found

    def _names(self, path: str) -> tuple[str, ...]:
        """What adapters call a cell, or the parts of a fused one."""
        parent, dot, last = path.rpartition(".")
        names = []
        for part in self._packed.get(last, {last: None}):
            name = self._rename(f"{parent}{dot}{part}")
            if not isinstance(name, str):
                raise TypeError(f"rename: expected a string as the name of {path}, got {name}")
            if not name:
                raise ValueError(f"rename: expected a name of {path}, got {name!r}")
            names.append(name)
        return tuple(names)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The loaded adapters by name, with what is known of each."""
        return MappingProxyType(dict(self._adapters))

    def load_adapter(self, path: str | os.PathLike[str], adapter_name: str) -> None:
        """Reads a PEFT folder into a free slot of every bank.

        Args:
            path (Union[str, os.PathLike]): The folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
            adapter_name (str): What :meth:`route` calls it.

        Raises:
            TypeError: The name is not a string.
            ValueError: The name is taken, no slot is free, the folder cannot be honoured exactly (see ``mal.peft``), or
                it does not fit the model. Nothing has changed.
            OSError: A file is missing or cannot be read.
        """
        # Before the lock: steps of other threads go on while files are read.
        adapter = peft.read_adapter(path, max_rank=self._max_rank)
        with self._lock:
            info = AdapterInfo(
                self._free_slot(adapter_name),
                os.path.abspath(path),
                max(weights.rank for weights in adapter.modules.values()),
                {name: (w.rank, w.scaling) for name, w in adapter.modules.items()},
                adapter.config,
            )
            self._check_modules(adapter)
            prepared = {}
            for target in self._targets:
                if not any(part in adapter.modules for part in target.parts):
                    continue
                try:
                    prepared[target] = target.prepare(info.slot, adapter.modules)
                except ValueError as error:
                    names = ", ".join(part for part in target.parts if part in adapter.modules)
                    raise ValueError(f"{adapter.path}: {names}: {error}") from None
            try:
                for target in self._targets:
                    if target in prepared:
                        target.cell.write_adapter(info.slot, prepared[target][0])
                    else:  # a checkpoint of the whole model may have left something there
                        target.cell.clear_adapter(info.slot)
            except BaseException:
                self._clear(info.slot)
                raise
            for target, (_, sizes) in prepared.items():
                target.sizes = sizes
            self._adapters[adapter_name] = info

    def _free_slot(self, adapter_name: str) -> int:
        """Where an adapter of that name can go."""
        self._require_attached()
        if not isinstance(adapter_name, str):
            raise TypeError(f"adapter_name: expected a string, got {type(adapter_name).__name__}")
        if adapter_name in self._adapters:
            raise ValueError(
                f"adapter_name: expected a name that is not loaded (delete_adapter it first), got {adapter_name!r}"
            )
        taken = {info.slot for info in self._adapters.values()}
        for slot in range(self._num_adapters):
            if slot not in taken:
                return slot
        raise ValueError(
            f"adapter {adapter_name!r}: expected a free slot, got {self._num_adapters} of {self._num_adapters} taken by "
            f"{', '.join(self._adapters)}"
        )

    def _check_modules(self, adapter: peft.PeftAdapter) -> None:
        """Every module of the adapter has a place, and every place that its configuration targets a module."""
        attached = {part for target in self._targets for part in target.parts}
        whole = {self._rename(target.path): target.path for target in self._targets}
        for name in adapter.modules:
            if name not in self._dense_names:
                reason = "where it has no dense cell"
                if name in whole:
                    parts = self._packed[whole[name].rpartition(".")[2]]
                    reason = f"which packed_modules takes for {', '.join(parts)}"
                raise ValueError(
                    f"{adapter.path}: expected modules of this model, got {name}, {reason}"
                )
            if name not in attached:
                raise ValueError(
                    f"{adapter.path}: expected modules in target_modules, got {name}, to which nothing is attached"
                )
        names = list(self._dense_names)
        if str(adapter.config.get("target_modules")).lower() == "all-linear":
            names = [name for name in names if name.rpartition(".")[2] not in _places.OUTPUT_LAYERS]
        for name in peft.targeted(adapter.config, names):
            # PEFT adapts a shared module in one of its places only.
            if not any(one in adapter.modules for one in self._dense_names[name]):
                raise ValueError(
                    f"{adapter.path}: expected tensors for every dense cell that its target_modules name, got none for "
                    f"{name}"
                )

    def delete_adapter(self, adapter_name: str) -> None:
        """Empties an adapter's slot.

        Raises:
            ValueError: No adapter has that name, or the current route uses it (route first).
        """
        with self._lock:
            self._require_attached()
            info = self._adapters.get(adapter_name)
            if info is None:
                raise ValueError(self._unknown(adapter_name))
            if adapter_name in self._trained:
                raise ValueError(
                    f"adapter_name: expected one that is not trainable (trainable([]) first), got {adapter_name!r}"
                )
            if adapter_name in self._routed:
                raise ValueError(
                    f"adapter_name: expected one that the current route does not use (route first), got {adapter_name!r}"
                )
            del self._adapters[adapter_name]
            self._clear(info.slot)

    def _clear(self, slot: int) -> None:
        for target in self._targets:
            target.cell.clear_adapter(slot)

    def route(self, names: Sequence[str | None], tokens_per_row: int = 1) -> None:
        """Says which adapter each row of the next batches uses. Rows past the end run the base model.

        Args:
            names (Sequence[Optional[str]]): One name for each row, None for the base model.
            tokens_per_row (int): For models that flatten [B, S, H] to [B·S, H] before a dense cell: S. A cell that
                gets two dimensions then takes a slot for each token, one that gets more a slot for each row.

        Raises:
            TypeError: names is no sequence of strings and None, or tokens_per_row no integer.
            ValueError: A name is not loaded, or there are more rows than max_rows. The route has not changed.
        """
        with self._lock:
            self._require_attached()
            if isinstance(names, (str, bytes)) or not isinstance(names, Sequence):
                raise TypeError(
                    f"names: expected a list of names and None, got {type(names).__name__}"
                )
            if isinstance(tokens_per_row, bool) or not isinstance(tokens_per_row, int):
                raise TypeError(
                    f"tokens_per_row: expected an integer, got {type(tokens_per_row).__name__}"
                )
            if tokens_per_row < 1:
                raise ValueError(f"tokens_per_row: expected at least 1, got {tokens_per_row}")
            for row, name in enumerate(names):
                if name is not None and not isinstance(name, str):
                    raise TypeError(
                        f"names: expected a string or None in row {row}, got {type(name).__name__}"
                    )
                if name is not None and name not in self._adapters:
                    raise ValueError(f"row {row}: {self._unknown(name)}")
            if len(names) * tokens_per_row > self._route.max_rows:
                raise ValueError(
                    f"names: expected at most max_rows = {self._route.max_rows} rows (times tokens_per_row), got "
                    f"{len(names)} times {tokens_per_row}"
                )
            self._write_route(tuple(names), tokens_per_row)

    def _write_route(self, names: tuple[str | None, ...], tokens_per_row: int) -> None:
        """An adapter that is being trained has its rows in the other bank."""
        served = [
            -1 if name is None or name in self._trained else self._adapters[name].slot
            for name in names
        ]
        _bank.wait_for_readers()
        self._route.write(served, tokens_per_row)
        if self._trained_route is not None:
            trained = [self._trained.index(name) if name in self._trained else -1 for name in names]
            self._trained_route.write(trained, tokens_per_row)
        self._routed, self._tokens_per_row = names, tokens_per_row

    @contextlib.contextmanager
    def step(self, names: Sequence[str | None], tokens_per_row: int = 1) -> Iterator[MultiLora]:
        """Routes, and holds every other route, load and delete back until the step within has finished.

        Examples:
            >>> import mindspore_addlora as mal
            >>> def serve(lora: "mal.MultiLora", model, batch, names):
            ...     with lora.step(names):
            ...         return model(batch)
        """
        with self._lock:
            self.route(names, tokens_per_row)
            try:
                yield self
            finally:
                _bank.wait_for_steps()  # what was called may still be under way

    def create_adapter(
        self, adapter_name: str, rank: int, lora_alpha: float, seed: int | None = None
    ) -> None:
        """Begins an adapter in a free slot, for every attached cell, as PEFT begins one: A uniform in +-1/sqrt(H1), and
        B zero, so that it changes nothing yet.

        Args:
            adapter_name (str): What :meth:`route` calls it.
            rank (int): At most max_rank.
            lora_alpha (float): Its scaling is lora_alpha / rank.
            seed (int, optional): Of the random A.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The name is taken, no slot is free, or the rank is out of range.
        """
        with self._lock:
            slot = self._free_slot(adapter_name)
            if isinstance(rank, bool) or not isinstance(rank, int):
                raise TypeError(f"rank: expected an integer, got {type(rank).__name__}")
            if not 1 <= rank <= self._max_rank:
                raise ValueError(f"rank: expected 1 <= rank <= {self._max_rank}, got {rank}")
            if not math.isfinite(lora_alpha):
                raise ValueError(f"lora_alpha: expected a finite number, got {lora_alpha}")
            random = np.random.default_rng(seed)
            scaling = lora_alpha / rank
            modules = {}
            for target in self._targets:
                limit = 1 / math.sqrt(target.cell.in_features)
                sizes = (
                    [size for _, size in target.cell.slices]
                    if target.cell.is_sliced
                    else [target.cell.out_features]
                )
                if target.stacked:
                    raise ValueError(self._needs_rows(target))
                for part, size in zip(target.parts, sizes, strict=True):
                    a = random.uniform(-limit, limit, (rank, target.cell.in_features))
                    b = np.zeros((size, rank), np.float32)
                    modules[part] = peft.LoraWeights(a.astype(np.float32), b, scaling, rank)
            for target in self._targets:
                target.cell.write_adapter(slot, target.prepare(slot, modules)[0])
            self._adapters[adapter_name] = AdapterInfo(
                slot, "", rank, {part: (rank, scaling) for part in modules}, {}
            )

    @staticmethod
    def _needs_rows(target: _Target) -> str:
        return (
            f"{target.path}: expected the rows of its parts, without which they share a bank that cannot be trained: "
            'packed_modules={"...": {"name": rows, ...}}'
        )

    def trainable(self, names: Sequence[str]) -> list[Parameter]:
        """Makes these adapters learn, and no other: the parameters to give to an optimizer.

        They are copied into banks of their own, with trainable parameters; the others' banks stay frozen, so their bits
        stay whatever the optimizer does. Rows are routed by name as before. A model that was compiled is compiled anew.
        Scaling is part of the trained B. ``trainable([])`` ends training and takes what was learnt into service.

        Args:
            names (Sequence[str]): Loaded or created adapters; [] for none.

        Returns:
            list[mindspore.Parameter].

        Raises:
            TypeError: names is no sequence of strings.
            ValueError: A name is not loaded or is given twice, or a fused projection was packed without its rows.
        """
        with self._lock:
            self._require_attached()
            if isinstance(names, (str, bytes)) or not isinstance(names, Sequence):
                raise TypeError(f"names: expected a list of names, got {type(names).__name__}")
            for name in names:
                if name not in self._adapters:
                    raise ValueError(self._unknown(name))
            if len(set(names)) < len(names):
                raise ValueError(f"names: expected each once, got {list(names)}")
            for target in self._targets if names else []:
                if target.stacked:
                    raise ValueError(self._needs_rows(target))
            self._store_trained()
            for target in self._targets if self._trained else []:
                target.cell.end_training()
            self._trained, self._trained_route = (), None
            parameters: list[Parameter] = []
            if names:
                slots = [self._adapters[name].slot for name in names]
                route = Route(self._route.max_rows, f"{self._targets[0].path}.trained_")
                for target in self._targets:
                    for parameter in target.cell.start_training(slots, route):
                        parameter.name = f"{target.path}.{parameter.name}"
                        parameters.append(parameter)
                self._trained, self._trained_route = tuple(names), route
            self._write_route(self._routed, self._tokens_per_row)
            _places.forget_graphs(self._model)
            return parameters

    def _store_trained(self) -> None:
        """Copies what was learnt so far into the frozen banks."""
        slots = [self._adapters[name].slot for name in self._trained]
        for target in self._targets if self._trained else []:
            target.cell.store_trained(slots)

    def save_adapter(self, path: str | os.PathLike[str], adapter_name: str) -> None:
        """Writes an adapter as a folder that PEFT can load: its own ranks, and scaling taken out of B again.

        Args:
            path (Union[str, os.PathLike]): The folder; files of the same names are replaced.
            adapter_name (str): A loaded, created or trained adapter.

        Raises:
            ValueError: No adapter has that name, or a fused projection was packed without its rows.
            OSError: The folder or a file cannot be written.
        """
        with self._lock:
            self._require_attached()
            info = self._adapters.get(adapter_name)
            if info is None:
                raise ValueError(self._unknown(adapter_name))
            if adapter_name in self._trained:
                self._store_trained()
            modules = {}
            for target in self._targets:
                if target.stacked and any(part in info.modules for part in target.parts):
                    raise ValueError(self._needs_rows(target))
                for part, cell in zip(target.parts, target.cell.loras, strict=True):
                    if part not in info.modules:
                        continue
                    rank, scaling = info.modules[part]
                    a, b = cell.read_adapter(info.slot)
                    b = b[:, :rank].astype(np.float32)
                    if scaling != 0:
                        b = b / np.float32(scaling)
                    modules[part] = peft.LoraWeights(a[:rank].astype(np.float32), b, scaling, rank)
            peft.write_adapter(
                path,
                modules,
                base_model_name_or_path=info.config.get("base_model_name_or_path"),
                task_type=info.config.get("task_type"),
            )

    def detach(self) -> nn.Cell:
        """Puts the model's own cells back and returns the model. Attach a new MultiLora to go on."""
        with self._lock:
            self._require_attached()
            _bank.wait_for_steps()
            for place in self._places:
                _places.replace(place, place.cell)
            for target in self._targets:
                if self._trained:
                    target.cell.end_training()
                target.cell.unwrap()
            self._trained, self._trained_route = (), None
            _places.forget_graphs(self._model)
            self._attached = False
            self._adapters.clear()
            self._routed = ()
            return self._model

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the banks (``ms.save_checkpoint``) and beside them the table of names and slots.

        Args:
            folder (Union[str, os.PathLike]): Made where it is missing; files of the same names are replaced.

        Raises:
            OSError: The folder or a file cannot be written.
        """
        with self._lock:
            self._require_attached()
            _bank.wait_for_steps()
            self._store_trained()
            os.makedirs(folder, exist_ok=True)
            banks = [{"name": name, "data": bank} for name, bank in self._banks().items()]
            new = os.path.join(folder, f"new_{BANKS_FILE}")
            ms.save_checkpoint(banks, new)
            table = {
                "banks": _digest(new),
                "geometry": self._geometry(),
                "adapters": {name: asdict(info) for name, info in self._adapters.items()},
                "sizes": {target.path: target.sizes for target in self._targets},
            }
            table_file = os.path.join(folder, f"new_{TABLE_FILE}")
            with open(table_file, "w", encoding="utf-8") as file:
                json.dump(table, file, indent=1)
            os.replace(new, os.path.join(folder, BANKS_FILE))
            os.replace(table_file, os.path.join(folder, TABLE_FILE))

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Reads what :meth:`save` wrote, into a MultiLora that was attached in the same way and has no adapter loaded.

        Raises:
            ValueError: It was saved from other cells, ranks, slots or dtypes, a file is cut or of another save, or an
                adapter is loaded here. Nothing has changed.
            OSError: A file is missing or cannot be read.
        """
        with self._lock:
            self._require_attached()
            if self._adapters:
                raise ValueError(
                    f"restore: expected no adapter to be loaded, got {', '.join(self._adapters)}"
                )
            table_file = os.path.join(folder, TABLE_FILE)
            table = _read_table(table_file)
            for name, here in self._geometry().items():
                if table["geometry"].get(name) != here:
                    raise ValueError(
                        f"{table_file}: {name}: expected {here}, got {table['geometry'].get(name)}"
                    )
            adapters = {
                name: _adapter_info(f"{table_file}: adapters: {name}", info)
                for name, info in table["adapters"].items()
            }
            slots = {info.slot for info in adapters.values()}
            if len(slots) < len(adapters) or not slots <= set(range(self._num_adapters)):
                raise ValueError(
                    f"{table_file}: adapters: expected a slot for each in 0..{self._num_adapters - 1}, got "
                    f"{[info.slot for info in adapters.values()]}"
                )
            if {target.path for target in self._targets} != set(table["sizes"]):
                raise ValueError(f"{table_file}: sizes: expected those of the attached cells")
            banks_file = os.path.join(folder, BANKS_FILE)
            if _digest(banks_file) != table["banks"]:
                raise ValueError(
                    f"{banks_file}: expected the file that {table_file} was saved with"
                )
            saved = ms.load_checkpoint(banks_file)
            _bank.wait_for_readers()
            for name, bank in self._banks().items():
                _bank.write_whole(bank, saved[name].asnumpy())
            for target in self._targets:
                target.sizes = table["sizes"][target.path]
            self._adapters = adapters

    def _banks(self) -> dict[str, Parameter]:
        """The parameters of the banks by the names that they have in a saved one."""
        return {
            name: bank
            for target in self._targets
            for name, bank in zip(target.bank_names, target.cell.bank(), strict=True)
        }

    def _geometry(self) -> dict[str, Any]:
        """What a saved bank must agree with."""
        return {name: [str(bank.dtype), list(bank.shape)] for name, bank in self._banks().items()}

    def _require_attached(self) -> None:
        if not self._attached:
            raise ValueError("this MultiLora was detached; attach a new one")

    def _unknown(self, name: object) -> str:
        loaded = ", ".join(repr(one) for one in self._adapters) or "none"
        return f"expected the name of a loaded adapter ({loaded}), got {name!r}"

    def __repr__(self) -> str:
        if not self._attached:
            return "MultiLora(detached)"
        banks = [p for target in self._targets for p in target.cell.bank()]
        size = sum(p.nbytes for p in banks)
        dtypes = ", ".join(sorted({str(p.dtype) for p in banks}))
        lines = [
            f"{name}: slot {info.slot}, rank {info.rank}, {len(info.modules)} modules, {info.path}"
            for name, info in self._adapters.items()
        ]
        free = self._num_adapters - len(self._adapters)
        return "\n  ".join(
            [
                f"MultiLora({len(self._targets)} cells, max_rank {self._max_rank}, {free} of {self._num_adapters} slots "
                f"free, banks {size:,} bytes of {dtypes}, {len(self._routed)} rows routed)",
                *lines,
            ]
        )


def _digest(path: str) -> str:
    """What a file is known by: the banks and their table must be of one save."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _read_table(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        try:
            table = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    keys = {"banks": str, "geometry": dict, "adapters": dict, "sizes": dict}
    if not isinstance(table, dict) or not all(
        isinstance(table.get(key), kind) for key, kind in keys.items()
    ):
        raise ValueError(f"{path}: expected what save wrote: {', '.join(keys)}")
    return table


def _adapter_info(where: str, saved: Any) -> AdapterInfo:
    try:
        modules = {
            name: (int(rank), float(scaling)) for name, (rank, scaling) in saved["modules"].items()
        }
        return AdapterInfo(
            int(saved["slot"]),
            str(saved["path"]),
            int(saved["rank"]),
            modules,
            dict(saved["config"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: expected what save wrote, got {error!r}") from None
