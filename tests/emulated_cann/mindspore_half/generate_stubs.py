#!/usr/bin/env python3
"""Makes MindSpore's own Ascend backend load on a machine without CANN.

Reads the installed MindSpore (without importing it), generates a library with a stub for every symbol that its Ascend
plugin wants from CANN and that the emulated CANN does not have, and lays out a toolkit folder around both.

    generate_stubs.py BUILD_DIR     prints the environment variables as `export NAME=value` lines
    prepare(build_dir)              returns them as a dict

Set them before Python starts: MindSpore reads some when it is imported, and the loader reads LD_LIBRARY_PATH only once.
"""

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import emulated_cann  # noqa: E402

# Libraries that MindSpore opens by name at run time, or that the loader asks for on behalf of those.
OPENED_BY_NAME = """
libge_runner libgraph libascendcl libmsprofiler libhccl libruntime libascend_hal libacl_op_compiler libacl_tdt_channel
libacl_tdt_queue libplatform libc_sec libprofapi libregister libmmpa libascendalog libexe_graph liberror_manager
""".split()

# The parts of MindSpore that load with the Ascend plugin. Its optional kernel packages (ATB, internal kernels) are left
# out: they fail to load with a warning, and MindSpore goes on with aclnn alone.
PLUGIN = [
    "plugin/libmindspore_ascend.so.2",
    "plugin/libmindspore_ops_ascend.so",
    "plugin/ascend/libmindspore_ascend_res_manager.so",
    "plugin/ascend/libd_collective.so",
    "plugin/ascend/libhccl_plugin.so",
    "plugin/ascend/libmindspore_graph_ir.so",
    "plugin/ascend/ms_kernels_symmetric_memory/shmem/shmem/lib/libshmem.so",
]

# Names of C functions of CANN's that MindSpore looks up with dlsym; the operators (aclnn*) are left out on purpose: one
# that is not emulated must be reported as missing, not answer 0.
LOOKED_UP = re.compile(rb"(?:acl(?!nn)[A-Za-z]{3,}|hal[A-Z][A-Za-z]+|rt[A-Z][A-Za-z]+|Hccl[A-Z][A-Za-z]+)")

# Optional functions whose absence MindSpore notices and copes with; a stub that does nothing would break it.
BETTER_ABSENT = re.compile(r"aclrtMallocAlign32|aclnn.*|PTA.*")

STUB_SOURCE_HEAD = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

static long stub(const char *name, bool *told) {
  if (!*told && std::getenv("EMU_STUB_LOG")) std::fprintf(stderr, "emulated CANN: stub %s\n", name);
  *told = true;
  return 0;
}

// GE's table of error texts is a singleton whose inline functions work on the object itself.
extern "C" void *_ZN2ge13StatusFactory8InstanceEv() {
  struct Table {
    std::map<unsigned, std::string> texts;
    char room[4096];
  };
  static Table &table = *new Table();
  return &table;
}

// GE's operator registry: it has what the emulated CANN can run, and an operator of it is an empty object.
extern "C" bool emu_has_single_operator(const char *type);
extern "C" bool _ZN2ge15OperatorFactory9IsExistOpEPKc(const char *type) { return emu_has_single_operator(type); }
extern "C" void *_ZN2ge15OperatorFactory14CreateOperatorEPKcS2_(void *place, const char *, const char *) {
  return std::memset(place, 0, 32);
}
extern "C" void *_ZN2ge15OperatorFactory14CreateOperatorERKSsS2_(void *place, const void *, const void *) {
  return std::memset(place, 0, 32);
}
"""


def mindspore_folder():
    spec = importlib.util.find_spec("mindspore")
    if spec is None or not spec.origin:
        raise RuntimeError("MindSpore is not installed in this Python")
    return Path(spec.origin).parent


def run(*command):
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def symbols(library):
    """(undefined, defined) names of the library's dynamic symbol table; weak undefined ones do not count."""
    undefined, defined = set(), set()
    for line in run("readelf", "--dyn-syms", "-W", library).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].endswith(":"):
            continue
        binding, section, name = fields[4], fields[6], fields[7].split("@")[0]
        if section != "UND":
            defined.add(name)
        elif binding == "GLOBAL":
            undefined.add(name)
    return undefined, defined


def needed(library):
    return re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", "-W", library))


def system_library(name):
    path = run("g++", f"-print-file-name={name}").strip()
    return Path(path) if "/" in path else None


def collect(lib):
    """What the plugin needs: names of the libraries that are nowhere, and names of the symbols that nothing defines."""
    waiting = [lib / each for each in PLUGIN if (lib / each).exists()]
    seen, missing, undefined, defined = set(), set(), set(), set()
    by_name = {path.name: path for path in lib.rglob("*.so*")}
    while waiting:
        path = waiting.pop()
        if path.name in seen:
            continue
        seen.add(path.name)
        wants, has = symbols(path)
        defined |= has
        # MindSpore's common libraries are complete; only the Ascend plugin refers to CANN.
        if str(path.relative_to(lib) if path.is_relative_to(lib) else "") in PLUGIN:
            undefined |= wants
        for name in needed(path):
            found = by_name.get(name) or system_library(name)
            if found:
                waiting.append(found)
            else:
                missing.add(name)
    return missing, undefined - defined


def looked_up(lib):
    names = set()
    for each in PLUGIN:
        path = lib / each
        if path.exists():
            for text in re.split(rb"[^\x21-\x7e]", path.read_bytes()):
                if LOOKED_UP.fullmatch(text):
                    names.add(text.decode())
    return names


def stub_source(names):
    lines = [STUB_SOURCE_HEAD]
    by_hand = set(re.findall(r"(_ZN\w+)\(", STUB_SOURCE_HEAD))
    for name in sorted(names):
        if re.match(r"_ZT[IVS]", name):
            lines.append(f'extern "C" {{ void *{name}[64] = {{}}; }}')
        elif name not in by_hand:
            lines.append(f'extern "C" long {name}() {{ static bool told; return stub("{name}", &told); }}')
    return "\n".join(lines) + "\n"


def link_shared(output, *inputs, libraries=()):
    paths = [str(Path(each).resolve()) for each in libraries]
    folders = {str(Path(each).parent) for each in paths}
    run("g++", "-shared", "-fPIC", "-O0", "-w", "-std=c++17", "-o", output, *inputs, f"-Wl,-soname,{output.name}",
        "-Wl,--no-as-needed", *paths, *(f"-Wl,-rpath,{each}" for each in sorted(folders)))


def write_toolkit_files(home, version):
    for folder in ("compiler", "opp", "opp/vendors", "opp/built-in", "runtime", "toolkit"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("compiler", "opp", "runtime", "toolkit"):
        (home / folder / "version.info").write_text(f"Version={version}\n")
    include = home / "include"
    shutil.rmtree(include, ignore_errors=True)
    shutil.copytree(HERE.parent / "include", include)
    shutil.rmtree(include / "emu")


def environment(home):
    return {
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_TOOLKIT_HOME": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "LD_LIBRARY_PATH": str(home / "lib64"),
        # Work that runs at once keeps its errors easy to place. MindSpore gives the same results in the other modes.
        "EMU_STREAM_MODE": os.environ.get("EMU_STREAM_MODE", "now"),
    }


def prepare(build_dir, version="9.1.0"):
    """Builds the emulated CANN and the toolkit folder in `build_dir`, unless they are there; returns the variables."""
    build_dir = emulated_cann.build(build_dir)
    mindspore = mindspore_folder()
    release = (mindspore / "version.py").read_text().split("'")[1]
    home = build_dir / f"mindspore-{release}" / "cann"
    lib64 = home / "lib64"
    done = home / "complete"
    emulated = build_dir / "layouts/mindspore"
    write_toolkit_files(home, version)
    have = set().union(*(symbols(path)[1] for path in emulated.glob("*.so")))
    recipe = hashlib.sha256(repr((str(mindspore), Path(__file__).read_bytes(), sorted(have))).encode()).hexdigest()
    if done.exists() and done.read_text() == recipe:
        return environment(home)
    lib64.mkdir(parents=True, exist_ok=True)

    runtime, operators = emulated / "libemu_runtime.so", emulated / "libopapi.so"
    missing, undefined = collect(mindspore / "lib")
    names = {each for each in (undefined | looked_up(mindspore / "lib")) - have if not BETTER_ABSENT.fullmatch(each)}
    source = lib64.parent / "stubs.cpp"
    source.write_text(stub_source(names))
    stubs = lib64 / "libemu_stubs.so"
    link_shared(stubs, source, libraries=[runtime])
    for name in missing | {f"{each}.so" for each in OPENED_BY_NAME}:
        if not (emulated / name).exists():
            libraries = [runtime, stubs] if name == "libascendcl.so" else [stubs]
            link_shared(lib64 / name, libraries=libraries)
    for path in emulated.glob("*.so"):
        link = lib64 / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    done.write_text(recipe)
    return environment(home)


def main():
    for name, value in prepare(sys.argv[1]).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
