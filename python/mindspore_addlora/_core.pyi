"""The C++ core. Use mindspore_addlora.raw, which documents it."""

from collections.abc import Sequence
from typing import Any, TypeAlias

__version__: str
LIMITS: dict[str, int]

_Described: TypeAlias = tuple[str, tuple[int | None, ...]]

class DeviceTensor:
    """A tensor in the NPU's memory: made by device_tensor."""

    def __init__(self, pointer: int, shape: Sequence[int], dtype: str, item_bytes: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...

class Executor:
    """A planned call: made by add_lora_get_workspace_size."""

    def set_repeatable(self) -> None:
        """Lets the executor run more than once. To be called right after the first phase."""

def add_lora(
    y: Any,
    x: Any,
    weight_b: Any,
    indices: Any,
    weight_a: Any,
    layer_idx: Any,
    scale: Any,
    y_offset: Any,
    y_slice_size: Any,
    out: Any,
    backend: Any,
    limits: Any,
    rounding: Any,
    /,
) -> Any: ...
def add_lora_get_workspace_size(
    y: Any,
    x: Any,
    weight_b: Any,
    indices: Any,
    weight_a: Any,
    layer_idx: Any,
    scale: Any,
    y_offset: Any,
    y_slice_size: Any,
    out: Any,
    backend: Any,
    limits: Any,
    rounding: Any,
    /,
) -> tuple[int, Executor]: ...
def add_lora_execute(workspace: Any, executor: Any, stream: Any, /) -> None: ...
def gradient(
    wanted: str,
    g: Any,
    x: Any,
    weight_b: Any,
    indices: Any,
    weight_a: Any,
    layer_idx: Any,
    scale: Any,
    y_offset: Any,
    out: Any,
    /,
) -> None: ...
def probe(
    y: Any,
    x: Any,
    weight_b: Any,
    indices: Any,
    weight_a: Any,
    layer_idx: Any,
    scale: Any,
    y_offset: Any,
    y_slice_size: Any,
    out: Any,
    /,
) -> tuple[int, int, int]: ...
def check_described(
    y: _Described,
    x: _Described,
    weight_b: _Described,
    indices: _Described,
    weight_a: _Described | None,
    layer_idx: int,
    y_offset: int,
    y_slice_size: int,
    limits: str,
    rounding: str,
    /,
) -> None: ...
def refuse_missing(argument: str, /) -> None: ...
def check_device_sizes(w: int, l: int, h2: int, r: int, h1: int | None, /) -> None: ...
def refuse_width(argument: str, name: str, width: int, /) -> None: ...
def rules() -> list[tuple[str, str, str, int, bool]]: ...
def backend_info(name: Any, /) -> tuple[bool, str, str]: ...
def kernel_sets() -> tuple[str, ...]: ...
def last_kernel_set() -> str | None: ...
def set_num_threads(n: Any, /) -> None: ...
def get_num_threads() -> int: ...
def measure_flops() -> float: ...
def measure_read(buffer: Any, /) -> float: ...
