"""MindSpore's own Ascend backend over the emulated CANN: every line of try_mindspore.py must say ok."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mindspore") is None, reason="MindSpore is not installed"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is missing"),
]


@pytest.mark.parametrize("mode", ["now", "sync", "thread"])
def test_mindspore_on_the_emulated_cann(emulated_cann_build, mode):
    environment = {**os.environ, "EMU_STREAM_MODE": mode, "EMU_STREAM_DELAY_US": "300"}
    done = subprocess.run(
        [sys.executable, str(HERE / "mindspore_half/try_mindspore.py"), str(emulated_cann_build)],
        capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.startswith("FAIL")]
    assert sum(line.startswith("ok ") for line in lines) >= 29
