"""Many LoRA adapters, one base model, one batch: the AddLora operator for MindSpore."""
from . import raw
