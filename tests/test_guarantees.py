"""docs/guarantees.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def functions_in(path: Path) -> set[str]:
    """The names of its test functions, methods included."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_test_named_here_exists():
    named = re.findall(r"`(tests/[\w/]+\.(?:py|cpp|json))(?:::(\w+))?`", PAGE)
    assert len(named) > 50
    for file, test in named:
        path = ROOT / file
        assert path.is_file(), file
        if test:
            assert test in functions_in(path), f"{file}::{test}"
        elif path.suffix == ".py":
            assert functions_in(path), file


def test_every_promise_has_a_test():
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", PAGE.split("## One run")[0], flags=re.MULTILINE)
    promises = [proof for name, proof in rows if name not in ("promise", "fault", "case", "---")]
    assert len(promises) > 35
    assert all("`tests/" in proof for proof in promises)


def test_every_fault_is_on_the_page():
    faults = {
        t for t in functions_in(ROOT / "tests" / "test_faults.py") if t.startswith("test_fault_")
    }
    assert {name[11:13] for name in faults} == {f"{n:02}" for n in range(1, 15)}
    assert {name for name in faults if f"::{name}`" not in PAGE} == set()


def test_the_bound_of_scratch_is_the_tested_one():
    import test_memory as memory

    assert memory.FIXED_BYTES == 8 << 20
    assert f"8 MiB + {memory.ROW_BYTES} bytes a row + (0.5 MiB + 2 KiB a rank) a thread" in PAGE
    assert (memory.THREAD_BYTES, memory.RANK_BYTES) == (1 << 19, 2 << 10)
