"""Three adapters trained at once, in one batch, on one frozen base model; then saved, reloaded and served mixed.

The base is the small Llama of data/tiny_llama, which knows no language. Each adapter learns one small text by heart: a
clause, a recipe and a piece of code, byte by byte. Every batch holds rows of all three.

The program prints how well each adapter predicts each text before and after, draws the losses (training.png), writes the
adapters as folders that PEFT can load, reads them into a fresh model and serves one batch of the three. It ends with an
error where an adapter did not learn its text, or where the served model is not the trained one.

    python examples/train_three_adapters.py [--steps 150] [--output FOLDER] [--pynative]

It draws with matplotlib and shows a progress bar of tqdm: pip install "mindspore-addlora[examples]".
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import mindspore as ms
import mindspore_addlora as mal
import numpy as np
from mindspore import Tensor, nn, ops
from tiny_llama import DATA, load_model

TEXTS = {
    "clause": "Either party may end this contract by notice in writing, thirty days before.",
    "recipe": "Melt the butter, stir in the flour, add the milk slowly and simmer it gently.",
    "code": "for row in rows:\n    if row.adapter is None:\n        continue\n    out += delta(row)",
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LENGTH = 32
ROWS_EACH = 4


def windows(text: str, random: np.random.Generator) -> np.ndarray:
    """Some stretches of a text as bytes, [ROWS_EACH, LENGTH]."""
    data = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    begins = random.integers(0, len(data) - LENGTH + 1, ROWS_EACH)
    return np.stack([data[begin : begin + LENGTH] for begin in begins])


def losses_of_rows(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean loss of the next byte, for each row."""
    vocabulary = logits.shape[-1]
    flat = ops.cross_entropy(
        ops.reshape(logits[:, :-1], (-1, vocabulary)),
        ops.reshape(ids[:, 1:], (-1,)),
        reduction="none",
    )
    return ops.mean(ops.reshape(flat, (ids.shape[0], -1)), 1)


def attach() -> tuple[nn.Cell, mal.MultiLora]:
    model = load_model(DATA)
    return model, mal.MultiLora(model, TARGETS, max_rank=8, num_adapters=3)


def every_pair(model: nn.Cell, lora: mal.MultiLora, ids: dict[str, np.ndarray]) -> np.ndarray:
    """The loss of each adapter (row) on each text (column), in one batch of nine."""
    names = [name for name in TEXTS for _ in TEXTS]
    lora.route(names)
    batch = Tensor(np.concatenate([ids[text] for _ in TEXTS for text in TEXTS]))
    return losses_of_rows(model(batch), batch).asnumpy().reshape(len(TEXTS), len(TEXTS))


def show(title: str, pairs: np.ndarray) -> None:
    print(f"{title:<22}" + "".join(f"{text:>10}" for text in TEXTS))
    for name, row in zip(TEXTS, pairs, strict=True):
        print(f"  {name:<20}" + "".join(f"{value:>10.3f}" for value in row))


def draw(history: np.ndarray, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for name, values in zip(TEXTS, history.T, strict=True):
        pyplot.plot(values, label=name)
    pyplot.xlabel("step")
    pyplot.ylabel("loss of the next byte")
    pyplot.title("three adapters, one batch")
    pyplot.legend()
    pyplot.savefig(file, dpi=120)


def main() -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, help="where the adapters and the picture go")
    parser.add_argument("--pynative", action="store_true", help="PyNative in place of GRAPH_MODE")
    arguments = parser.parse_args()
    output = (arguments.output or Path(tempfile.mkdtemp())).resolve()
    output.mkdir(parents=True, exist_ok=True)
    os.chdir(tempfile.mkdtemp())  # MindSpore leaves folders in the current directory
    ms.set_context(mode=ms.PYNATIVE_MODE if arguments.pynative else ms.GRAPH_MODE)

    random = np.random.default_rng(0)
    begin = {name: windows(text, random)[:1] for name, text in TEXTS.items()}
    model, lora = attach()
    for seed, name in enumerate(TEXTS):
        lora.create_adapter(name, rank=8, lora_alpha=16, seed=seed)
    show("loss before", every_pair(model, lora, begin))

    parameters = lora.trainable(list(TEXTS))
    lora.route([name for name in TEXTS for _ in range(ROWS_EACH)])
    optimizer = nn.Adam(parameters, learning_rate=5e-3)

    def loss(ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = losses_of_rows(model(ids), ids)
        return ops.sum(rows), ops.mean(ops.reshape(rows, (len(TEXTS), -1)), 1)

    step = ms.value_and_grad(loss, None, parameters, has_aux=True)
    history = []
    for _ in tqdm(range(arguments.steps), desc="training", unit="step"):
        batch = np.concatenate([windows(text, random) for text in TEXTS.values()])
        (_, each), gradients = step(Tensor(batch))
        optimizer(gradients)
        history.append(each.asnumpy())
    draw(np.array(history), output / "training.png")

    trained = every_pair(model, lora, begin)
    show("loss after", trained)
    for name in TEXTS:
        lora.save_adapter(output / name, name)

    fresh, server = attach()
    for name in TEXTS:
        server.load_adapter(output / name, name)
    served = every_pair(fresh, server, begin)
    difference = float(np.abs(served - trained).max())
    print(f"saved in {output}, read back and served: losses differ by at most {difference:.1e}")
    others = trained[~np.eye(len(TEXTS), dtype=bool)].min()
    if not (trained.diagonal() < others).all():
        print("an adapter did not learn its own text best", file=sys.stderr)
        return 1
    if not difference < 1e-3:  # a NaN too
        print("the served model is not the trained one", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
