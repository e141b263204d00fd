"""mal.add_lora and mal.nn.AddLora on MindSpore's own Ascend backend, over the emulated CANN: one process, many checks.

MindSpore's libraries must find the emulated CANN when Python starts, so the checks run in a process of their own and
report by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
HALF = HERE / "emulated_cann" / "mindspore_half"
CHECKS = HERE / "ascend_checks.py"


@pytest.fixture(scope="session")
def report(emulated_cann_build, tmp_path_factory):
    sys.path.insert(0, str(HALF))
    import generate_stubs

    environment = os.environ | generate_stubs.prepare(emulated_cann_build)
    environment |= {
        "EMU_BUILD": str(emulated_cann_build),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "emulated_cann")]),
        "EMU_STREAM_MODE": "thread",
    }
    done = subprocess.run(
        [sys.executable, str(CHECKS)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("ascend"),
        timeout=900,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    return lines, done


def test_every_check_passes(report):
    lines, done = report
    failed = [line for line in lines if not line.startswith("ok ")]
    assert not failed, "\n".join(failed) + done.stdout[-6000:]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert len(lines) == 2 * CHECKS.read_text().count("\n@check\n") + 1


@pytest.fixture
def unloaded():
    from mindspore_addlora.ascend import extension

    extension.load.cache_clear()
    yield extension
    extension.load.cache_clear()


def test_a_missing_compiler_is_named(unloaded, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"found no compiler: expected g\+\+ on PATH"):
        unloaded.load()


def test_missing_headers_of_cann_are_named(unloaded, monkeypatch, tmp_path):
    # What a script that was meant to source CANN's set_env.sh may leave: no variable, or one that leads nowhere.
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
    with pytest.raises(
        RuntimeError, match="expected CANN's headers under ASCEND_HOME_PATH"
    ) as refused:
        unloaded.load()
    assert str(tmp_path / "nothing") in str(refused.value)
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path / "nothing" / "opp"))
    with pytest.raises(RuntimeError, match="expected CANN's headers under ASCEND_HOME_PATH"):
        unloaded.load()
