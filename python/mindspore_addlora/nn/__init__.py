"""Cells with banks of adapters."""

from __future__ import annotations

from .add_lora import AddLora
from .lora_dense import LoraDense

__all__ = ["AddLora", "LoraDense"]
