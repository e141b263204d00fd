"""python -m mindspore_addlora info: what a bug report should contain."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import emulated_cann
import mindspore_addlora
import numpy as np
from mindspore_addlora import raw


def info(tmp_path, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "mindspore_addlora", "info", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_for_programs(tmp_path):
    known = json.loads(info(tmp_path, "--json", ADDLORA_NUM_THREADS="3", ADDLORA_ISA="scalar"))
    assert known["mindspore_addlora"] == mindspore_addlora.__version__
    assert known["packages"]["numpy"] == np.__version__
    assert known["packages"]["mindspore"].startswith("2.")
    assert known["cpu"]["kernel_sets"] == list(raw.kernel_sets())
    assert known["cpu"]["kernel_set"] == "scalar"
    assert known["cpu"]["threads"] == 3
    assert known["environment"]["ADDLORA_ISA"] == "scalar"


def test_for_people_without_cann(tmp_path):
    empty = dict.fromkeys(("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"), "")
    text = info(tmp_path, **empty)
    assert "kernel set in use" in text
    assert "not available: CANN's runtime not found" in text


def test_a_kernel_set_that_the_cpu_lacks_is_said(tmp_path):
    text = info(tmp_path, ADDLORA_ISA="abacus")
    assert "abacus" in text
    assert json.loads(info(tmp_path, "--json", ADDLORA_ISA="abacus"))["cpu"]["kernel_set"] is None


def test_with_cann(emulated_cann_build, tmp_path):
    toolkit = emulated_cann.toolkit_environment(emulated_cann_build, "newer")
    assert "SoC Ascend910B2" in info(tmp_path, **toolkit)
    unsupported = json.loads(info(tmp_path, "--json", **toolkit, EMU_SOC="Ascend910_9391"))["npu"]
    assert not unsupported["available"]
    assert "Ascend910_9391" in unsupported["reason"]
    assert "libopapi_math.so" in unsupported["detail"]
