"""A small Llama in plain MindSpore: grouped-query attention, rotary positions, SwiGLU, RMSNorm.

data/tiny_llama holds its weights, four adapters of different ranks, modules and scalings as PEFT saved them, and the
logits that PEFT computed for a batch in which each row has its own adapter. The program runs that batch and prints, for
each row, how far the logits are from PEFT's and how far the adapter moved them. A difference above 2e-4 ends it with an
error.

    python examples/tiny_llama.py [--fused] [--pynative]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import mindspore as ms
import mindspore_addlora as mal
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from safetensors.numpy import load_file

DATA = Path(__file__).resolve().parent / "data" / "tiny_llama"
ADAPTERS = ("qv_r8", "attn_r16_rslora", "mlp_r32", "all_r4_pattern")
BASE = "__base__"
TOLERANCE = 2e-4

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""The projections that a fused model holds as one, in the order of their rows."""


class RMSNorm(nn.Cell):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = Parameter(np.ones(size, np.float32), name="weight")
        self.eps = eps

    def construct(self, x: Tensor) -> Tensor:
        return self.weight * (x * ops.rsqrt(ops.mean(x * x, -1, True) + self.eps))


def rotary_tables(positions: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """The cosines and sines that rotate a head at each position, [positions, head_size]."""
    frequencies = theta ** -(np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size))
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies).astype(np.float32)
    angles = np.concatenate([angles, angles], axis=1)
    return Tensor(np.cos(angles)), Tensor(np.sin(angles))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + half]) of each head, as Llama pairs them."""
    half = x.shape[-1] // 2
    turned = ops.concat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


class Attention(nn.Cell):
    """Causal attention in which several query heads share a key and value head."""

    def __init__(self, config: dict, fused: bool) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_size = hidden // self.heads
        self.q_size = self.heads * self.head_size
        self.kv_size = self.kv_heads * self.head_size
        self.fused = fused
        if fused:
            self.qkv_proj = nn.Dense(hidden, self.q_size + 2 * self.kv_size, has_bias=False)
        else:
            self.q_proj = nn.Dense(hidden, self.q_size, has_bias=False)
            self.k_proj = nn.Dense(hidden, self.kv_size, has_bias=False)
            self.v_proj = nn.Dense(hidden, self.kv_size, has_bias=False)
        self.o_proj = nn.Dense(self.q_size, hidden, has_bias=False)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.fused:
            qkv = self.qkv_proj(x)
            q = qkv[..., : self.q_size]
            k = qkv[..., self.q_size : self.q_size + self.kv_size]
            v = qkv[..., self.q_size + self.kv_size :]
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)

        # [batch, key and value heads, query heads of each, length, head size]
        group = self.heads // self.kv_heads
        q = ops.transpose(
            ops.reshape(q, (batch, length, self.kv_heads, group, self.head_size)), (0, 2, 3, 1, 4)
        )
        k = ops.transpose(
            ops.reshape(k, (batch, length, self.kv_heads, 1, self.head_size)), (0, 2, 3, 1, 4)
        )
        v = ops.transpose(
            ops.reshape(v, (batch, length, self.kv_heads, 1, self.head_size)), (0, 2, 3, 1, 4)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)

        scores = ops.matmul(q, ops.swapaxes(k, -1, -2)) / math.sqrt(self.head_size)
        out = ops.matmul(ops.softmax(scores + mask, -1), v)
        out = ops.reshape(ops.transpose(out, (0, 3, 1, 2, 4)), (batch, length, self.q_size))
        return self.o_proj(out)


class FeedForward(nn.Cell):
    """SwiGLU: a projection gated by the SiLU of another."""

    def __init__(self, config: dict, fused: bool) -> None:
        super().__init__()
        hidden, self.size = config["hidden_size"], config["intermediate_size"]
        self.fused = fused
        if fused:
            self.gate_up_proj = nn.Dense(hidden, 2 * self.size, has_bias=False)
        else:
            self.gate_proj = nn.Dense(hidden, self.size, has_bias=False)
            self.up_proj = nn.Dense(hidden, self.size, has_bias=False)
        self.down_proj = nn.Dense(self.size, hidden, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        if self.fused:
            gate_up = self.gate_up_proj(x)
            gate, up = gate_up[..., : self.size], gate_up[..., self.size :]
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(gate * ops.sigmoid(gate) * up)


class DecoderLayer(nn.Cell):
    def __init__(self, config: dict, fused: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config, fused)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = FeedForward(config, fused)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Cell):
    def __init__(self, config: dict, fused: bool) -> None:
        super().__init__()
        positions = config["max_position_embeddings"]
        head_size = config["hidden_size"] // config["num_attention_heads"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.CellList(
            [DecoderLayer(config, fused) for _ in range(config["num_hidden_layers"])]
        )
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.cos, self.sin = rotary_tables(positions, head_size, config["rope_theta"])
        # Added to the scores: a position sees itself and what is before it.
        self.mask = Tensor(
            np.triu(np.full((positions, positions), np.finfo(np.float32).min, np.float32), 1)
        )

    def construct(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        cos, sin, mask = self.cos[:length], self.sin[:length], self.mask[:length, :length]
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class Llama(nn.Cell):
    """input_ids int32 [batch, length] to logits float32 [batch, length, vocabulary]."""

    def __init__(self, config: dict, fused: bool = False) -> None:
        super().__init__()
        self.model = Decoder(config, fused)
        self.lm_head = nn.Dense(config["hidden_size"], config["vocab_size"], has_bias=False)

    def construct(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids))


def load_weights(model: nn.Cell, stored: dict[str, np.ndarray]) -> None:
    """Fills every parameter of the model from the array of its name; a packed one from the arrays of its parts."""
    left = dict(stored)
    for name, parameter in model.parameters_and_names():
        path, _, kind = name.rpartition(".")
        parent, _, cell = path.rpartition(".")
        # nn.Embedding has a name of its own for its weight.
        kind = {"embedding_table": "weight"}.get(kind, kind)
        arrays = [
            left.pop(f"{parent}.{part}.{kind}".lstrip(".")) for part in PACKED.get(cell, [cell])
        ]
        array = np.concatenate(arrays)
        if array.shape != parameter.shape:
            raise ValueError(f"{name}: expected the shape {parameter.shape}, got {array.shape}")
        parameter.set_data(Tensor(array))
    if left:
        raise ValueError(f"the model has no parameter for {', '.join(sorted(left))}")


def load_model(folder: str | os.PathLike, fused: bool = False) -> nn.Cell:
    """The model of a folder with config.json and model.safetensors.

    With fused=True each layer has qkv_proj and gate_up_proj in place of the five projections that these stand for.
    """
    config = json.loads(Path(folder, "config.json").read_text())
    model = Llama(config, fused)
    load_weights(model, load_file(Path(folder, "model.safetensors")))
    model.set_train(False)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fused",
        action="store_true",
        help="one projection for q, k and v, and one for gate and up",
    )
    parser.add_argument("--pynative", action="store_true", help="PyNative in place of GRAPH_MODE")
    arguments = parser.parse_args()

    os.chdir(tempfile.mkdtemp())  # MindSpore leaves folders in the current directory
    ms.set_context(mode=ms.PYNATIVE_MODE if arguments.pynative else ms.GRAPH_MODE)
    expected = np.load(DATA / "expected.npz")
    names = [None if name == BASE else str(name) for name in expected["adapter_names"]]
    input_ids = Tensor(expected["input_ids"])

    model = load_model(DATA, fused=arguments.fused)
    base = model(input_ids).asnumpy()

    if arguments.fused:
        targets, packed = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], PACKED
    else:
        targets, packed = (
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            None,
        )
    lora = mal.MultiLora(
        model,
        target_modules=targets,
        packed_modules=packed,
        max_rank=32,
        num_adapters=len(ADAPTERS),
    )
    for name in ADAPTERS:
        lora.load_adapter(DATA / name, name)
    lora.route(names)
    logits = model(input_ids).asnumpy()

    print(f"{'row':>3}  {'adapter':<16}  {'from PEFT':>9}  {'moved by its adapter':>20}")
    for row, name in enumerate(names):
        difference = np.abs(logits[row] - expected["logits"][row]).max()
        moved = np.abs(logits[row] - base[row]).max()
        print(f"{row:>3}  {name or 'none':<16}  {difference:>9.1e}  {moved:>20.3f}")
    worst = np.abs(logits - expected["logits"]).max()
    if not worst <= TOLERANCE:  # a NaN too
        print(f"the largest difference, {worst:.1e}, is above {TOLERANCE:.0e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
