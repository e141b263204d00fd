"""What holds for every test: a directory of its own, and one hypothesis profile."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "emulated_cann"))

# Examples are bounded so that the suite stays short; ADDLORA_TEST_FACTOR multiplies them for a long
# run (docs/guarantees.md). Without a deadline a slow machine changes
# nothing; without a database a run does not depend on the one before it, and a failure prints the
# blob that reproduces it.
FACTOR = int(os.environ.get("ADDLORA_TEST_FACTOR", "1"))
hypothesis.settings.register_profile(
    "addlora", deadline=None, max_examples=100 * FACTOR, database=None, print_blob=True
)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("addlora"), derandomize=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "addlora")


@pytest.fixture(autouse=True)
def in_a_temporary_directory(tmp_path, monkeypatch):
    """MindSpore writes kernel_meta folders where it runs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def emulated_cann_build(tmp_path_factory):
    """The folder of the emulated CANN, built once; EMU_BUILD_DIR keeps it between runs."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing")
    import emulated_cann

    folder = os.environ.get("EMU_BUILD_DIR") or tmp_path_factory.mktemp("emulated_cann")
    return emulated_cann.build(folder)
