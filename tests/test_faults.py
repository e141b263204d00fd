"""One test for each fault that other multi-LoRA software was publicly reported to have: this one is immune.

Each runs through raw and through MindSpore in both modes, except where it says otherwise.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import mindspore as ms
import mindspore_addlora as mal
import ml_dtypes
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore_addlora import raw
from mindspore_calls import through_mindspore
from reference import (
    Array,
    Problem,
    active_rows,
    assert_kept,
    assert_right,
    assert_same_bits,
    bits,
    make_problem,
    written_elements,
)
from safetensors.numpy import load_file, save_file

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}


@pytest.fixture(params=["raw", *MODES])
def run(request):
    """Computes a problem through one of the interfaces."""

    def through(problem: Problem, rounding: str = "float32") -> Array:
        if request.param == "raw":
            return raw.add_lora(**problem, limits="none", rounding=rounding)
        return through_mindspore(problem, rounding, MODES[request.param])

    return through


def problem_with(indices: list[int], **sizes: object) -> Problem:
    return make_problem(
        np.random.default_rng(len(indices)),
        b=len(indices),
        indices=np.array(indices, np.int32),
        **sizes,
    )


def test_fault_01_index_minus_one_does_not_pick_the_last_adapter(run):
    problem = problem_with([-1, 2, -1, 3, -4, -5])
    out = run(problem)
    assert_right(out, problem)
    base = [0, 2, 4, 5]
    assert_same_bits(out[base], problem["y"][base])
    # Nor is its row of x read, or the last adapter on its behalf.
    for name in ("weight_a", "weight_b"):
        problem[name][3] = np.nan
    problem["x"][base] = np.nan
    out = run(problem | {"indices": np.array([-1, 2, -1, -1, -4, -5], np.int32)})
    assert_same_bits(out[[0, 2, 3, 4, 5]], problem["y"][[0, 2, 3, 4, 5]])
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("first", [[-1], [4], [-1, -1, 4]])
def test_fault_02_a_batch_may_begin_with_a_base_row(run, first):
    problem = problem_with([*first, 1, 0, 3, 1])
    out = run(problem)
    assert_right(out, problem)
    assert_same_bits(out[: len(first)], problem["y"][: len(first)])
    assert (bits(out)[len(first) :] != bits(problem["y"])[len(first) :]).any(axis=1).all()


def test_fault_03_base_rows_between_others_stay_bit_for_bit(run):
    problem = problem_with([2, -1, 0, 4, 1, -1, 2, 3, -1], dtype=np.float32)
    signalling = problem["y"].view(np.uint32)
    signalling[[1, 5], ::3] = (
        0x7FA00001  # a signalling NaN with a payload, which arithmetic would quiet
    )
    out = run(problem)
    assert_kept(out, problem)
    active = active_rows(problem["indices"], 4)
    alone = {name: problem[name][active] for name in ("y", "x", "indices")}
    assert_same_bits(run(problem | alone), out[active])


def test_fault_04_row_times_stride_beyond_31_bits():
    """87383 tokens of 12288 columns: raw, in place; only the pages that are written exist."""
    rows, columns = 87383, 12288
    problem = make_problem(
        np.random.default_rng(4), b=4, h2=columns, h3=columns, w=2, y_offset=0,
        indices=np.array([0, 1, 1, 0], np.int32),
    )  # fmt: skip
    where = np.array([0, rows // 2, rows - 2, rows - 1])
    x = np.zeros((rows, problem["x"].shape[1]), np.float16)
    indices = np.full(rows, -1, np.int32)
    y = np.zeros((rows, columns), np.float16)
    x[where], indices[where] = problem["x"], problem["indices"]
    raw.add_lora(**problem | {"y": y, "x": x, "indices": indices}, out=y)
    assert_right(y[where], problem | {"y": np.zeros((4, columns), np.float16)})
    y[where] = 0
    assert not any(y[i : i + 1000].view(np.uint64).any() for i in range(0, rows, 1000))


@pytest.mark.parametrize("h2", [1, 3, 63, 65, 100, 79360])
def test_fault_05_widths_that_no_64_divides_and_large_vocabularies(run, h2):
    problem = problem_with([1, -1, 0], h1=h2 % 67 + 1, h2=h2, h3=h2 + 7, y_offset=7, w=2)
    assert_right(run(problem), problem)


@pytest.mark.parametrize("r,h2", [(64, 16), (128, 1), (33, 32), (256, 40)])
def test_fault_06_a_rank_above_the_width_of_the_slice(run, r, h2):
    problem = problem_with([1, -1, 0, 1], r=r, h2=h2, h3=64, w=2, y_offset=3)
    assert_right(run(problem), problem)


def test_fault_07_many_rows_with_four_adapters_in_bfloat16(run):
    rng = np.random.default_rng(7)
    problem = make_problem(
        rng, b=1500, h1=256, h2=128, h3=128, r=16, y_offset=0, dtype=ml_dtypes.bfloat16,
        indices=rng.integers(0, 4, 1500).astype(np.int32),
    )  # fmt: skip
    assert_right(run(problem), problem)


def test_fault_08_neither_scratch_nor_unused_slots_are_read(run):
    """NaN in every adapter, layer and rank that no row uses, and in the workspace."""
    problem = problem_with([1, -1, 3, 1], r=8, w=5)
    expected = run(problem)
    for name in ("weight_a", "weight_b"):
        problem[name][[0, 2, 4]] = np.nan
        problem[name][:, 1 - problem["layer_idx"]] = np.nan
    assert_same_bits(run(problem), expected)
    names = ("y", "x", "weight_b", "indices", "weight_a", "layer_idx", "scale", "y_offset")
    out = np.full_like(problem["y"], np.nan)
    size, executor = raw.add_lora_get_workspace_size(
        *(problem[name] for name in names), -1, out, limits="none"
    )
    raw.add_lora_execute(np.full(size // 4 + 1, np.nan, np.float32), executor)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("mode", MODES)
def test_fault_08_a_rank_below_the_cells(mode):
    """A slot that held rank 8 and then rank 2 is as one that only ever held rank 2."""
    ms.set_context(mode=MODES[mode])
    rng = np.random.default_rng(8)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    y, x, indices = Tensor(draw(3, 16)), Tensor(draw(3, 24)), Tensor(np.array([1, -1, 1], np.int32))
    a, b = draw(2, 24), draw(16, 2)
    fresh, used = (mal.AddLora(24, 16, 8, 2, dtype=ms.float32, a_init="zeros") for _ in range(2))
    with np.errstate(all="ignore"):
        used.set_adapter(1, draw(8, 24) * np.inf, draw(16, 8) * np.inf)
    used.set_adapter(1, a, b)
    fresh.set_adapter(1, a, b)
    assert_same_bits(used(y, x, indices).asnumpy(), fresh(y, x, indices).asnumpy())


@pytest.mark.parametrize("r", [1, 7, 8, 9, 12, 20, 24, 72])
def test_fault_09_rank_8_and_ranks_that_no_16_divides(run, r):
    problem = problem_with([1, 0, -1, 3, 2, 2, 0, 1], r=r, h2=40, h3=64)
    assert_right(run(problem), problem)
    # The rows of an adapter do not reach into one another: each alone has the same bits.
    out = run(problem)
    for row in range(8):
        part = {name: problem[name][row : row + 1] for name in ("y", "x", "indices")}
        assert_same_bits(run(problem | part), out[row : row + 1])


def test_fault_10_adapters_that_come_back_in_a_batch(run):
    problem = problem_with([0, 1, 0, 2, 1, -1, 0, 2, 2, 0, 1])
    out = run(problem)
    assert_right(out, problem)
    order = np.argsort(problem["indices"], kind="stable")
    gathered = {name: problem[name][order] for name in ("y", "x", "indices")}
    assert_same_bits(run(problem | gathered), out[order])


@pytest.mark.parametrize("mode", MODES)
def test_fault_11_a_slot_given_to_another_adapter_leaves_the_other_rows_alone(mode):
    """Of the cell: base rows meet no stale slot, rows of other slots see nothing of the change, and the
    rows of the slot see all of it."""
    ms.set_context(mode=MODES[mode])
    rng = np.random.default_rng(11)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    cell = mal.AddLora(24, 16, 4, 3, dtype=ms.float32)
    first, second, other = ((draw(4, 24), draw(16, 4)) for _ in range(3))
    cell.set_adapter(0, *other)
    y, x = draw(4, 16), draw(4, 24)
    indices = np.array([0, 1, -1, 3], np.int32)

    def outputs() -> Array:
        return cell(Tensor(y), Tensor(x), Tensor(indices)).asnumpy()

    def expected(adapter: tuple[Array, Array] | None) -> Array:
        stacked = [np.zeros((3, 1, *shape), np.float32) for shape in ((4, 24), (16, 4))]
        for bank, of_other, of_slot in zip(stacked, other, adapter or (0.0, 0.0), strict=True):
            bank[0, 0], bank[1, 0] = of_other, of_slot
        return raw.add_lora(y, x, stacked[1], indices, stacked[0], limits="none")

    for adapter in (first, second, None, first):
        if adapter is None:
            cell.clear_adapter(1)
        else:
            cell.set_adapter(1, *adapter)
        assert_same_bits(outputs(), expected(adapter))
    assert_same_bits(outputs()[2:], y[2:])


# ---- adapters that PEFT saved ------------------------------------------------------------------


def adapter_folder(path: Path, ranks: dict[str, int], **config: object) -> Path:
    rng = np.random.default_rng(0)
    path.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(ranks)}
    (path / "adapter_config.json").write_text(json.dumps(settings | config))
    tensors = {}
    for module, rank in ranks.items():
        name = f"base_model.model.{module}.lora_"
        tensors[name + "A.weight"] = rng.standard_normal((rank, 6), np.float32)
        tensors[name + "B.weight"] = rng.standard_normal((5, rank), np.float32)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_fault_13_patterns_and_rslora_are_honoured(tmp_path):
    """Scaling and rank of each module, as PEFT computes them; and the result with them."""
    folder = adapter_folder(
        tmp_path / "adapter", {"q_proj": 4, "v_proj": 9}, rank_pattern={"v_proj": 9},
        alpha_pattern={"v_proj": 6}, use_rslora=True,
    )  # fmt: skip
    modules = mal.peft.read_adapter(folder).modules
    assert {name: (m.rank, m.scaling) for name, m in modules.items()} == {
        "q_proj": (4, 8 / math.sqrt(4)),
        "v_proj": (9, 6 / math.sqrt(9)),
    }
    for module in modules.values():
        cell = mal.AddLora(6, 5, 9, 1, dtype=ms.float32)
        cell.set_adapter(0, module.a, module.b, module.scaling)
        x = np.ones((1, 6), np.float32)
        out = cell(
            Tensor(np.zeros((1, 5), np.float32)), Tensor(x), Tensor(np.zeros(1, np.int32))
        ).asnumpy()
        exact = module.scaling * module.b.astype(np.float64) @ module.a.astype(np.float64) @ x[0]
        np.testing.assert_allclose(out[0], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=str
)
def test_fault_14_what_is_no_plain_lora_is_refused(tmp_path, config):
    folder = adapter_folder(tmp_path / "adapter", {"q_proj": 4}, **config)
    with pytest.raises(mal.peft.PeftError, match=next(iter(config))):
        mal.peft.read_adapter(folder)
    assert mal.peft.read_adapter(adapter_folder(tmp_path / "plain", {"q_proj": 4})).modules


# ---- adapters by name on a model ---------------------------------------------------------------


class TwoProjections(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Dense(6, 5)
        self.v_proj = nn.Dense(6, 5)

    def construct(self, x):
        return self.q_proj(x) + self.v_proj(x)


class Served:
    """A model with adapters, its batch, and what it gives."""

    def __init__(self, mode: str, slots: int = 2) -> None:
        ms.set_context(mode=MODES[mode])
        self.model = TwoProjections()
        self.x = Tensor(np.random.default_rng(1).standard_normal((4, 6), np.float32))
        self.base = self()
        self.lora = mal.MultiLora(self.model, ["q_proj", "v_proj"], 16, slots)

    def __call__(self, names: list[str | None] | None = None) -> Array:
        if names is not None:
            self.lora.route(names)
        return self.model(self.x).asnumpy()


def ordinary_folder(path: Path, seed: int = 0) -> Path:
    folder = adapter_folder(path, {"q_proj": 4, "v_proj": 4})
    rng = np.random.default_rng(seed)
    names = [f"base_model.model.{m}.lora_{s}.weight" for m in ("q_proj", "v_proj") for s in "AB"]
    shapes = [(4, 6), (5, 4)] * 2
    tensors = {n: rng.standard_normal(s, np.float32) for n, s in zip(names, shapes, strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_fault_11_a_swapped_adapter_meets_no_base_row_and_no_other_request(mode, tmp_path):
    served = Served(mode)
    for seed, name in enumerate(("first", "second", "other")):
        ordinary_folder(tmp_path / name, seed)
    served.lora.load_adapter(tmp_path / "other", "other")
    served.lora.load_adapter(tmp_path / "first", "first")
    before = served(["first", "other", None, "first"])
    assert_same_bits(before[2], served.base[2])
    # A request under way keeps its adapter: what the route uses cannot be deleted.
    with pytest.raises(ValueError, match="route first"):
        served.lora.delete_adapter("first")
    assert_same_bits(served(), before)
    served.lora.route([None, "other"])
    served.lora.delete_adapter("first")
    served.lora.load_adapter(tmp_path / "second", "second")  # in the slot of the first
    after = served()
    assert_same_bits(after[[0, 2, 3]], served.base[[0, 2, 3]])
    assert_same_bits(after[1], before[1])
    with pytest.raises(ValueError, match="'first'"):
        served(["first"])
    swapped = served(["second", "other", None, "second"])
    assert_same_bits(swapped[[1, 2]], before[[1, 2]])
    assert (swapped[[0, 3]] != before[[0, 3]]).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Legal", "legal ", "", "code", "0"])
def test_fault_12_an_unknown_adapter_is_an_error_and_changes_nothing(mode, tmp_path, name):
    served = Served(mode)
    served.lora.load_adapter(ordinary_folder(tmp_path / "legal"), "legal")
    before = served(["legal", None, "legal"])
    for call in (lambda: served.lora.route([None, name]), lambda: served.lora.delete_adapter(name)):
        with pytest.raises(ValueError, match="expected the name of a loaded adapter") as refused:
            call()
        assert repr(name) in str(refused.value)
        assert_same_bits(served(), before)
    assert (before[0] != served.base[0]).all()
    assert list(served.lora.adapters) == ["legal"]


def test_fault_13_a_model_honours_patterns_and_rslora(tmp_path):
    served = Served("pynative")
    folder = adapter_folder(
        tmp_path / "adapter", {"q_proj": 4, "v_proj": 9}, rank_pattern={"v_proj": 9},
        alpha_pattern={"v_proj": 6}, use_rslora=True,
    )  # fmt: skip
    served.lora.load_adapter(folder, "patterned")
    delta = (served(["patterned"]) - served.base)[0]
    tensors = load_file(folder / "adapter_model.safetensors")
    exact = np.zeros(5)
    for module, scaling in (("q_proj", 8 / math.sqrt(4)), ("v_proj", 6 / math.sqrt(9))):
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        exact += scaling * b.astype(np.float64) @ a.astype(np.float64) @ served.x.asnumpy()[0]
    np.testing.assert_allclose(delta, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=str
)
def test_fault_14_a_model_does_not_load_what_is_no_plain_lora(tmp_path, config):
    served = Served("pynative")
    served.lora.load_adapter(ordinary_folder(tmp_path / "plain"), "plain")
    before = served(["plain", None])
    folder = adapter_folder(tmp_path / "adapter", {"q_proj": 4, "v_proj": 4}, **config)
    with pytest.raises(ValueError, match=next(iter(config))):
        served.lora.load_adapter(folder, "other")
    assert list(served.lora.adapters) == ["plain"]
    assert_same_bits(served(), before)


def test_each_adapter_changes_its_rows(run):
    """The problems above would not be right by accident: without the products they are wrong."""
    problem = problem_with([0, 1, 2, 3])
    changed = bits(run(problem)) != bits(problem["y"])
    assert changed[written_elements(**problem)].mean() > 0.9
