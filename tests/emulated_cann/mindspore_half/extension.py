"""The package's own extension for Ascend, as try_mindspore.py uses it: the module and the operator."""

from mindspore_addlora.ascend import extension


def load():
    """Builds what is not built yet. Returns the C++ module (for its in-place add_lora_) and the operator."""
    return extension.load(), extension.operator
