"""What importing gives, and what it does not bring with it."""

from __future__ import annotations

import subprocess
import sys

import mindspore_addlora as mal
import pytest
from mindspore_addlora import raw

PUBLIC = (
    "AclError",
    "AddLoraError",
    "BackendInfo",
    "Executor",
    "LIMITS",
    "add_lora",
    "add_lora_execute",
    "add_lora_get_workspace_size",
    "backends",
    "get_num_threads",
    "kernel_sets",
    "last_kernel_set",
    "set_num_threads",
)


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )


ONE_CALL = (
    "import numpy as np; one = np.ones((1, 16), np.float16);"
    "b = np.ones((1, 1, 16, 16), np.float16);"
    "out = raw.add_lora(one, one, b, np.zeros(1, np.int32)); assert out[0, 0] == 17;"
)


@pytest.mark.parametrize(
    "statements",
    [
        "import mindspore_addlora.raw, sys;",
        "import mindspore_addlora, sys; mindspore_addlora.raw; dir(mindspore_addlora);",
        "from mindspore_addlora import raw; import sys;" + ONE_CALL,
        "from mindspore_addlora import raw; import sys; raw.backends(); raw.kernel_sets();",
    ],
)
def test_raw_does_not_import_mindspore(statements):
    done = run(statements + "assert 'mindspore' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


def test_raw_works_where_mindspore_is_missing():
    """An entry of None in sys.modules makes an import fail."""
    done = run(
        "import sys; sys.modules['mindspore'] = None; from mindspore_addlora import raw;" + ONE_CALL
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    assert hasattr(raw, name)
    assert name in raw.__all__
    assert getattr(raw, name).__doc__


def test_all_names_exist():
    assert all(hasattr(raw, name) for name in raw.__all__)
    assert len(set(raw.__all__)) == len(raw.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        mal.no_such_name  # noqa: B018


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert mal.__version__ == version("mindspore-addlora")


def test_backends():
    backends = raw.backends()
    assert set(backends) == {"cpu", "aclnn"}
    for info in backends.values():
        assert isinstance(info, raw.BackendInfo)
        assert isinstance(info.available, bool)
        assert isinstance(info.detail, str)
        assert info.available or info.reason
    assert backends["cpu"].available
    assert any(name in backends["cpu"].detail for name in raw.kernel_sets())
