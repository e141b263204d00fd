"""Many LoRA adapters, one base model, one batch: the AddLora operator for MindSpore.

Importing this package does not import MindSpore; the first use of a name that needs it does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _core, raw

if TYPE_CHECKING:
    from . import nn, ops, peft
    from .multi_lora import MultiLora
    from .nn import AddLora, LoraDense
    from .ops import add_lora

__version__: str = _core.__version__

__all__ = [
    "AddLora",
    "LoraDense",
    "MultiLora",
    "__version__",
    "add_lora",
    "nn",
    "ops",
    "peft",
    "raw",
]

# Name -> the module that has it; None where the name is a module itself.
_LAZY = {
    "nn": None,
    "ops": None,
    "peft": None,
    "AddLora": "nn",
    "LoraDense": "nn",
    "MultiLora": "multi_lora",
    "add_lora": "ops",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _LAZY[name]
    module = importlib.import_module(f".{home or name}", __name__)
    value = module if home is None else getattr(module, name)
    # Stored, because MindSpore's compiler looks names up in the module's dictionary.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
