"""Where adapters go in a model: its dense cells, and what adapters call them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindspore import mint, nn

from . import peft
from .nn.lora_dense import LoraDense

# What PEFT leaves out of "all-linear" by asking the model for its output layer, which MindSpore's models cannot say.
OUTPUT_LAYERS = ("lm_head", "output_layer", "embed_out", "score", "classifier")

DENSE = (nn.Dense, mint.nn.Linear)


@dataclass
class Place:
    """Where a dense cell hangs in the model; a shared one hangs in several places."""

    parent: nn.Cell
    name: str
    path: str
    cell: nn.Cell


def dense_places(cell: nn.Cell, path: str = "", seen: set[int] | None = None) -> Iterator[Place]:
    """The places of the model's dense cells, and of those that hold adapters already. A cell that holds others is gone
    through once, however often it is used."""
    seen = {id(cell)} if seen is None else seen
    for name, child in cell._cells.items():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, (*DENSE, LoraDense)):
            yield Place(cell, name, child_path, child)
        elif child is not None and id(child) not in seen:
            seen.add(id(child))
            yield from dense_places(child, child_path, seen)


def choose(places: list[Place], target_modules: Sequence[str] | str) -> list[Place]:
    """The places that target_modules name."""
    paths = [place.path for place in places]
    if not isinstance(target_modules, Sequence):
        raise TypeError(
            f"target_modules: expected names or a regular expression, got {type(target_modules).__name__}"
        )
    if isinstance(target_modules, str):
        try:
            re.compile(target_modules)
        except re.error as error:
            raise ValueError(
                f"target_modules: {target_modules!r} is not a regular expression: {error}"
            ) from None
    if target_modules == "all-linear":
        paths = [path for path in paths if path.rpartition(".")[2] not in OUTPUT_LAYERS]
    if not isinstance(target_modules, str):
        target_modules = list(target_modules)
        for name in target_modules:
            if not isinstance(name, str):
                raise TypeError(f"target_modules: expected names, got {type(name).__name__}")
            if not peft.targeted({"target_modules": [name]}, paths):
                raise ValueError(
                    f"target_modules: expected names of dense cells, got {name!r}, which is the end of no path"
                )
    chosen = set(peft.targeted({"target_modules": target_modules}, paths))
    if not chosen:
        raise ValueError(
            f"target_modules: expected names of dense cells, got {target_modules!r}, which matches none of {len(paths)}"
        )
    picked = [place for place in places if place.path in chosen]
    for place in picked:
        if isinstance(place.cell, LoraDense):
            raise ValueError(
                f"target_modules: expected cells without adapters (detach first), got {place.path}, a LoraDense"
            )
    # All places of a shared cell are swapped, each for a bank of its own: its activation moves out of it.
    cells = {id(place.cell) for place in picked}
    return [place for place in places if id(place.cell) in cells]


def forget_graphs(model: nn.Cell) -> None:
    """A compiled graph, of the model or of a part that was called by itself, would go on with the cells that it was made
    of."""
    for _, cell in model.cells_and_names():
        cell.compile_cache.clear()


def replace(place: Place, cell: nn.Cell) -> None:
    """Hangs a cell into a place. Not by assignment, which would rename its parameters."""
    place.parent._cells[place.name] = cell
    if hasattr(place.parent, "cell_list"):  # SequentialCell runs this list
        place.parent.cell_list = list(place.parent._cells.values())


def packed_parts(
    packed_modules: Mapping[str, Sequence[str] | Mapping[str, int]] | None,
) -> dict[str, dict[str, int | None]]:
    """The parts of each fused cell with their rows, None where nobody said."""
    if packed_modules is None:
        return {}
    if not isinstance(packed_modules, Mapping):
        raise TypeError(f"packed_modules: expected a mapping, got {type(packed_modules).__name__}")
    packed: dict[str, dict[str, int | None]] = {}
    for fused, parts in packed_modules.items():
        where = f"packed_modules: {fused}"
        if isinstance(parts, str) or not isinstance(parts, (Mapping, Sequence)):
            raise TypeError(f"{where}: expected the names of its parts, got {type(parts).__name__}")
        for part in parts:
            if not isinstance(part, str):
                raise TypeError(f"{where}: expected strings as names, got {type(part).__name__}")
        if not parts:
            raise ValueError(f"{where}: expected at least one part")
        if len(set(parts)) < len(parts):
            raise ValueError(f"{where}: expected each part once, got {list(parts)}")
        packed[fused] = dict(parts) if isinstance(parts, Mapping) else dict.fromkeys(parts)
        if 0 < list(packed[fused].values()).count(None) < len(parts):
            raise ValueError(
                f"{where}: expected the rows of all parts or none, got {packed[fused]}"
            )
        for part, size in packed[fused].items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
                raise TypeError(
                    f"{where}: expected an integer as the rows of {part!r}, got {type(size).__name__}"
                )
            if size is not None and size < 1:
                raise ValueError(
                    f"{where}: expected at least 1 as the rows of {part!r}, got {size}"
                )
    return packed


def renaming(rename: Callable[[str], str] | Mapping[str, str] | None) -> Callable[[str], str]:
    if rename is None:
        return lambda path: path
    if not isinstance(rename, Mapping):
        if not callable(rename):
            raise TypeError(
                f"rename: expected a function or a mapping, got {type(rename).__name__}"
            )
        return rename
    patterns = []
    for pattern, replacement in rename.items():
        try:
            patterns.append((re.compile(pattern), replacement))
        except re.error as error:
            raise ValueError(
                f"rename: expected regular expressions, got {pattern!r}: {error}"
            ) from None

    def renamed(path: str) -> str:
        for pattern, replacement in patterns:
            path = pattern.sub(replacement, path)
        return path

    return renamed
