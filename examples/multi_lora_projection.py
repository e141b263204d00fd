"""One batch, many adapters, on real input: two projections of a real sentence encoder.

The data in data/minilm are activations of all-MiniLM-L6-v2 for eight sentences, three LoRA adapters that PEFT trained
and saved, and what PEFT computed for the batch in which each sentence uses its own adapter (or none).

For each projection this builds an nn.Dense with an AddLora beside it, loads the adapters, runs the mixed batch in
GRAPH_MODE and PyNative, in float16 and float32, and prints how far each row is from PEFT and how far its adapter moved
it. A difference that the dtype cannot explain ends the program with an error.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path

import mindspore as ms
import mindspore_addlora as mal
import numpy as np
from mindspore import Tensor, nn, ops
from safetensors.numpy import load_file

DATA = Path(__file__).resolve().parent / "data" / "minilm"
ADAPTERS = ("legal_r8", "support_r16", "code_r64")
PROJECTIONS = ("layer.0.attention.self.query", "layer.5.attention.self.value")
NONE = -1


class Projection(nn.Cell):
    """A dense layer in float32, and the adapters of a bank in their own dtype."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray, rank: int, dtype: ms.Type) -> None:
        super().__init__()
        out_features, in_features = weight.shape
        self.dense = nn.Dense(
            in_features, out_features, weight_init=Tensor(weight), bias_init=Tensor(bias)
        )
        self.lora = mal.nn.AddLora(in_features, out_features, rank, len(ADAPTERS), dtype=dtype)
        self.dtype = dtype

    def construct(self, x: Tensor, indices: Tensor) -> Tensor:
        y = ops.cast(self.dense(x), self.dtype)
        return self.lora(y, ops.cast(x, self.dtype), indices)


def read_adapter(name: str, projection: str) -> tuple[np.ndarray, np.ndarray, float] | None:
    """A [r, in], B [out, r] and the scaling of one projection; None where the adapter leaves it alone."""
    folder = DATA / name
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    key = f"base_model.model.encoder.{projection}.lora_{{}}.weight"
    if key.format("A") not in tensors:
        return None
    r = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(r) if config["use_rslora"] else r)
    return tensors[key.format("A")], tensors[key.format("B")], scaling


def reach(
    dtype: ms.Type,
    x: np.ndarray,
    dense: tuple[np.ndarray, np.ndarray],
    adapter: tuple[np.ndarray, np.ndarray, float] | None,
    expected: np.ndarray,
) -> np.ndarray:
    """How far rounding alone may take a result from PEFT's.

    Each rounding to the dtype is at most half a unit in the last place: x, A and B once each, y and the result once
    each. And two float32 sums of n products, PEFT's and ours, differ by at most 2 n 2^-24 times the sum of magnitudes.
    """
    half_unit = 2.0**-11 if dtype == ms.float16 else 2.0**-24
    smallest = 2.0**-24 if dtype == ms.float16 else 0.0  # float16's spacing near zero
    weight, bias = dense
    products = np.abs(x) @ np.abs(weight).T + np.abs(bias)
    delta = np.zeros_like(products)
    n = x.shape[-1]
    if adapter is not None:
        a, b, scaling = adapter
        delta = (np.abs(x) @ np.abs(a).T) @ np.abs(b * scaling).T
        n += len(a)
    base = x @ weight.T + bias
    rounded = half_unit * (3 * delta + np.abs(base) + np.abs(expected)) + smallest
    return rounded + 2 * n * 2.0**-24 * (products + delta)


def run(projection: str, dtype: ms.Type, mode: int, stored: dict[str, np.ndarray]) -> bool:
    ms.set_context(mode=mode)
    x, expected = stored[f"{projection}.input"], stored[f"{projection}.output"]
    weight, bias = stored[f"{projection}.weight"], stored[f"{projection}.bias"]
    adapters = {name: read_adapter(name, projection) for name in ADAPTERS}

    cell = Projection(weight, bias, rank=64, dtype=dtype)
    for slot, name in enumerate(ADAPTERS):
        adapter = adapters[name]
        if adapter is not None:
            a, b, scaling = adapter
            cell.lora.set_adapter(slot, a, b, scaling)
        else:
            cell.lora.clear_adapter(slot)

    names = [str(name) for name in stored["adapter_names"]]
    indices = np.array(
        [ADAPTERS.index(name) if name in ADAPTERS else NONE for name in names], np.int32
    )
    result = cell(Tensor(x), Tensor(indices)).asnumpy().astype(np.float64)

    print(
        f"\n{projection}, {str(dtype).lower()}, {'GRAPH_MODE' if mode == ms.GRAPH_MODE else 'PyNative'}"
    )
    print(f"{'row':>4}  {'adapter':<12} {'from PEFT':>10} {'of reach':>9} {'moved by':>10}")
    good = True
    for row, name in enumerate(names):
        adapter = adapters.get(name)
        difference = np.abs(result[row] - expected[row])
        used = (difference / reach(dtype, x[row], (weight, bias), adapter, expected[row])).max()
        good = good and used <= 1
        moved = np.abs(expected[row] - (x[row] @ weight.T + bias)).max() if adapter else 0.0
        print(
            f"{row:>4}  {name if adapter else '(none)':<12} {difference.max():>10.2e} {used:>9.0%} {moved:>10.2e}"
            + ("" if used <= 1 else "   TOO FAR")
        )
    return good


def main() -> int:
    with np.load(DATA / "expected.npz") as archive:
        stored = dict(archive)
    os.chdir(tempfile.mkdtemp())  # MindSpore leaves folders in the current directory
    good = all(
        [
            run(projection, dtype, mode, stored)
            for projection in PROJECTIONS
            for dtype in (ms.float16, ms.float32)
            for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE)
        ]
    )
    if not good:
        print("\nA row is further from PEFT than its dtype explains.", file=sys.stderr)
        return 1
    print("\nEvery row is as near to PEFT as its dtype allows.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
