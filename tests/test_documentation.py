"""What the README and the docstrings show is what happens."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "name", ["raw", "_errors", "ops", "nn.add_lora", "nn.lora_dense", "multi_lora"]
)
def test_the_examples_of_the_docstrings(name):
    module = importlib.import_module(f"mindspore_addlora.{name}")
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


def test_the_table_of_rules_is_the_code_s():
    script = runpy.run_path(str(ROOT / "scripts" / "update-readme-rules"), run_name="script")
    assert script["updated"](README) == README, "run scripts/update-readme-rules"
    assert README.count("| 561002 |") > 10


def test_the_first_program_runs(tmp_path):
    program = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, middle, last = (float(n) for n in done.stdout.strip().strip("[]").split())
    assert first > 0
    assert middle == 0, "the row in the middle is the base model's"
    assert last > 0


def test_the_snippet_of_a_whole_model():
    program = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]
    data = "examples/data/tiny_llama"
    prelude = f"""
import sys
sys.path.insert(0, "examples")
import numpy as np
from mindspore import Tensor
from tiny_llama import load_model
model = load_model("{data}")
input_ids = Tensor(np.load("{data}/expected.npz")["input_ids"][:3])
base = model(input_ids).asnumpy()
"""
    program = program.replace("adapters/legal", f"{data}/qv_r8")
    check = "print([bool((logits[i].asnumpy() == base[i]).all()) for i in range(3)])"
    done = subprocess.run(
        [sys.executable, "-c", prelude + program + check],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[False, True, False]"


def test_the_peft_snippet_runs():
    program = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 5.65"), done.stdout  # 16 / sqrt(8): rsLoRA


def test_the_snippets_of_the_serving_page():
    page = (ROOT / "docs" / "serving.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(snippets) >= 9
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(snippets)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "5 of 8 slots free" in done.stdout
    assert "got 'patent'" in done.stdout


def test_the_snippets_of_the_training_page(tmp_path):
    page = (ROOT / "docs" / "training.md").read_text()
    snippets = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", snippets.replace('"examples"', repr(str(ROOT / "examples")))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "8 2.0 (8, 64)"


def test_the_errors_that_the_readme_shows():
    import numpy as np
    from mindspore_addlora import raw

    y, x = np.zeros((3, 16), np.float16), np.zeros((3, 16), np.float16)
    a, b = np.zeros((4, 2, 16, 16), np.float16), np.zeros((4, 2, 16, 16), np.float16)
    indices = np.array([0, 5, 1], np.int32)
    for call, name in (({"layer_idx": 2}, "layer_idx"), ({}, "indices")):
        with pytest.raises(raw.AddLoraError) as refused:
            raw.add_lora(
                y, x, b, indices if name == "indices" else np.zeros(3, np.int32), a, **call
            )
        assert f"AddLoraError: {refused.value}" in README


class TestTheProjectionExample:
    SCRIPT = ROOT / "examples" / "multi_lora_projection.py"

    def run(self, script: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
            check=False,
        )

    def test_it_is_as_near_to_peft_as_it_says(self, tmp_path):
        done = self.run(self.SCRIPT, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = re.findall(r"^ +\d+  (\S+) +(\S+) +(\d+)% +(\S+)$", done.stdout, flags=re.MULTILINE)
        assert len(rows) == 2 * 2 * 2 * 8  # layers, dtypes, modes, sentences
        assert all(int(used) <= 100 for _, _, used, _ in rows)
        assert all((float(moved) > 0.01) == (name != "(none)") for name, _, _, moved in rows)
        assert not list(tmp_path.iterdir()), "it left something behind"

    def test_a_wrong_scaling_is_noticed(self, tmp_path):
        folder = tmp_path / "examples"
        folder.mkdir()
        (folder / "data").symlink_to(self.SCRIPT.parent / "data")
        right = "math.sqrt(r) if"
        source = self.SCRIPT.read_text()
        assert right in source
        script = folder / self.SCRIPT.name
        script.write_text(source.replace(right, "r if"))
        done = self.run(script, tmp_path)
        assert done.returncode == 1
        assert "TOO FAR" in done.stdout
