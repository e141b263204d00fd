"""What a bug report should contain: versions, the CPU and its kernel set, threads, MindSpore, and CANN or why not.

Nothing is imported for it but the core: MindSpore's version is read from its installed metadata.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from . import _core, raw

_PACKAGES = ("mindspore", "numpy", "ml_dtypes", "safetensors")
_VARIABLES = (
    "ADDLORA_ISA",
    "ADDLORA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "ADDLORA_CHECK_INDICES",
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "ASCEND_CUSTOM_OPP_PATH",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints what is known, and returns the exit status."""
    known = collect()
    print(json.dumps(known, indent=2) if arguments.json else as_text(known))
    return 0


def collect() -> dict[str, Any]:
    """Everything by name; what is not there is None."""
    cpu, npu = raw.backends()["cpu"], raw.backends()["aclnn"]
    return {
        "mindspore_addlora": _core.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": {
            "model": _cpu_model(),
            "kernel_sets": list(raw.kernel_sets()),
            "kernel_set": cpu.detail.removeprefix("kernel set ") if cpu.available else None,
            "reason": cpu.reason or None,
            "threads": raw.get_num_threads(),
        },
        "npu": {
            "available": npu.available,
            "reason": npu.reason or None,
            "detail": npu.detail or None,
        },
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def as_text(known: dict[str, Any]) -> str:
    """The same for people."""
    cpu, npu = known["cpu"], known["npu"]
    lines = [
        ("mindspore_addlora", known["mindspore_addlora"]),
        ("Python", known["python"]),
        ("system", known["system"]),
    ]
    lines += [(name, version or "not found") for name, version in known["packages"].items()]
    lines += [
        ("CPU", cpu["model"]),
        ("kernel sets", ", ".join(cpu["kernel_sets"])),
        ("kernel set in use", cpu["kernel_set"] or f"none: {cpu['reason']}"),
        ("threads", str(cpu["threads"])),
        ("NPU", npu["detail"] if npu["available"] else f"not available: {npu['reason']}"),
    ]
    if not npu["available"] and npu["detail"]:
        lines.append(("CANN", npu["detail"]))
    lines += [(f"${name}", value) for name, value in known["environment"].items()]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Hardware", "CPU part"):
            return value.strip()
    return platform.processor() or platform.machine()
