"""What the built library and the package contain: its own symbols alone, kernels that no older CPU could
pick up, no path of the machine that built it, hardening, and readers of adapters that execute nothing."""

from __future__ import annotations

import ast
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from mindspore_addlora import _core, peft

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(_core.__file__)
X86 = platform.machine() in ("x86_64", "AMD64")


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


needs_binutils = pytest.mark.skipif(
    shutil.which("nm") is None or shutil.which("readelf") is None, reason="binutils are missing"
)


# ---- the library -----------------------------------------------------------------------------


@needs_binutils
def test_the_library_exports_its_own_symbols_alone():
    exported = {
        line.split()[-1] for line in output("nm", "-D", "--defined-only", LIBRARY).splitlines()
    }
    listed = re.findall(r"^ +(\w+);", (ROOT / "cpp" / "exports.map").read_text(), re.MULTILINE)
    assert exported == set(listed)
    assert "PyInit__core" in exported
    assert all(name.startswith("AddLora") for name in exported - {"PyInit__core"})


@needs_binutils
def test_the_library_is_hardened():
    dynamic, headers = output("readelf", "-dW", LIBRARY), output("readelf", "-lW", LIBRARY)
    assert re.search(r"BIND_NOW|FLAGS_1.*\bNOW\b", dynamic), "symbols are bound when it is loaded"
    assert "GNU_RELRO" in headers, "and their table is read-only from then on"
    assert "TEXTREL" not in dynamic
    stack = re.search(r"GNU_STACK.*", headers)
    assert stack is not None
    assert "E" not in stack[0].split()[-2], "the stack is not executable"
    assert not re.search(r"R(UN)?PATH", dynamic), "libraries come from where the system has them"
    undefined = output("nm", "-D", "--undefined-only", LIBRARY)
    assert "__stack_chk_fail" in undefined


@needs_binutils
def test_the_library_links_to_the_systems_own_libraries_alone():
    needed = re.findall(r"NEEDED.*\[(.*?)\]", output("readelf", "-dW", LIBRARY))
    known = r"lib(stdc\+\+|m|gcc_s|c|pthread|dl)\.so\.\d+|ld-linux.*\.so\.\d+"
    assert [name for name in needed if not re.fullmatch(known, name)] == []


def test_no_path_of_the_build_is_in_the_library():
    content = LIBRARY.read_bytes()
    for path in (ROOT, Path.home(), Path("/tmp")):
        found = content.find(f"{path}/".encode())
        assert found < 0, content[found - 20 : found + 80]
    assert not re.search(rb"[\w/]+/(bindings|rules|plan|cpu_backend)\.cpp", content)


# ---- the kernels -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> dict[str, Path]:
    """The object files of the core, compiled as the package's are."""
    if shutil.which("g++") is None or shutil.which("cmake") is None:
        pytest.skip("g++ or cmake is missing")
    folder = tmp_path_factory.mktemp("core")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    output("cmake", "-S", ROOT, "-B", folder, *generator, "-DADDLORA_PYTHON=OFF")
    output("cmake", "--build", folder, "--target", "addlora_core", "-j2")
    found = {path.name.removesuffix(".cpp.o"): path for path in folder.rglob("kernels_*.o")}
    assert len(found) >= 2
    return found


@needs_binutils
def test_kernel_objects_hold_no_weak_symbols(objects):
    """The linker keeps one copy of a weak symbol: compiled for AVX-512, it would run on every CPU."""
    for name, path in objects.items():
        symbols = [line.split()[-2:] for line in output("nm", path).splitlines()]
        assert not [symbol for kind, symbol in symbols if kind in "WwVvuC"], name
        defined = [symbol for kind, symbol in symbols if kind in "TDRB"]
        assert len(defined) == 1, f"{name}: {defined}"
        assert re.search(r"k\w+Kernels", defined[0])
        wanted = {symbol for kind, symbol in symbols if kind == "U"}
        known = {"memcpy", "fmaf", "__cpu_model", "__stack_chk_fail", "_GLOBAL_OFFSET_TABLE_"}
        assert wanted <= known | {"__stack_chk_guard", "memset"}, name


@pytest.mark.skipif(not X86, reason="x86-64 only")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="binutils are missing")
def test_only_the_kernels_use_the_higher_instruction_sets(objects):
    """Every other object of the core has no instruction with the registers of AVX or AVX-512."""
    folder = next(iter(objects.values())).parents[1]
    others = [
        path for path in folder.rglob("*.o") if path.name.removesuffix(".cpp.o") not in objects
    ]
    assert len(others) > 5
    for path in [*others, objects["kernels_scalar"]]:
        assert not re.search(r"%[yz]mm\d", output("objdump", "-d", path)), path.name
    assert re.search(r"%zmm\d", output("objdump", "-d", objects["kernels_avx512"]))


# ---- adapters --------------------------------------------------------------------------------


def test_the_reader_of_adapters_can_execute_nothing():
    """It imports no reader of pickles and no loader of code, and calls neither eval nor exec. (That a
    pickle is refused, and headers that lie, is in test_peft.py.)"""
    assert peft.__file__ is not None
    tree = ast.parse(Path(peft.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile", "__import__"), node.lineno
    forbidden = {"pickle", "shelve", "marshal", "torch", "importlib", "runpy", "subprocess"}
    assert not imported & forbidden
    assert "safetensors" in imported
