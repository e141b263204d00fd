"""python -m mindspore_addlora selftest: on the CPU, on the emulated CANN, and where something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import emulated_cann
import pytest


def selftest(tmp_path, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "mindspore_addlora", "selftest", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )


def test_on_the_cpu(tmp_path):
    done = selftest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as expected" in done.stdout
    assert done.stdout.count("\nok ") >= 7


@pytest.mark.parametrize(
    ("layout", "settings", "slice_size"),
    [
        ("newer", {}, "means H2"),
        ("older", {"EMU_CANN_VERSION": "8.5.0", "EMU_SOC": "Ascend310P3"}, "refused with 561002"),
    ],
)
def test_each_quirk_is_seen_on_the_emulated_cann(
    emulated_cann_build, tmp_path, layout, settings, slice_size
):
    toolkit = emulated_cann.toolkit_environment(emulated_cann_build, layout)
    done = selftest(tmp_path, "--backend", "aclnn", **toolkit, **settings, EMU_STREAM_MODE="thread")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line[4:].split("  ")[0]: line for line in done.stdout.splitlines()}
    assert "not written" in lines["out"]
    for name in ("y", "index -1", "index W", "scale 0.5", "workspace bytes", "one row"):
        assert name in lines, done.stdout
    assert slice_size in lines["y_slice_size -1"]


def test_what_differs_is_named_and_is_the_exit_status(emulated_cann_build, tmp_path):
    toolkit = emulated_cann.toolkit_environment(emulated_cann_build, "newer")
    failure = {"EMU_FAIL": "aclnnAddLora.kernel:1:507015:the core stopped"}
    done = selftest(tmp_path, "--backend", "aclnn", **toolkit, **failure)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERS" in done.stdout
    assert "the core stopped" in done.stdout
    # One case fails, and the others have their lines.
    assert "25 checks, not as expected: a mixed batch" in done.stdout


def test_without_cann_it_says_what_is_missing(tmp_path):
    empty = dict.fromkeys(("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"), "")
    done = selftest(tmp_path, "--backend", "aclnn", **empty)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "CANN's runtime not found" in done.stderr


def test_a_probe_that_did_not_run_says_so(emulated_cann_build, tmp_path):
    toolkit = emulated_cann.toolkit_environment(emulated_cann_build, "newer")
    # Seven results and the first probe come before it.
    failure = {"EMU_FAIL": "aclnnAddLora.kernel:9:507015:the core stopped"}
    done = selftest(tmp_path, "--backend", "aclnn", **toolkit, **failure)
    assert done.returncode == 1, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "index -1" in line)
    assert line.startswith("DIFFERS") and "not run, codes 0 and 507015" in line
