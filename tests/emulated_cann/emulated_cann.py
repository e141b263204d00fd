"""Building the emulated CANN, and its control interface, for tests."""

import ctypes
import json
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
LAYOUTS = ("newer", "older", "split", "without_operator")


def build(build_dir):
    """Builds (or rebuilds what changed) and returns the build folder; `layouts/` in it holds the libraries."""
    build_dir = Path(build_dir).resolve()
    configure = ["cmake", "-S", str(SOURCE), "-B", str(build_dir)]
    if shutil.which("ninja") and not (build_dir / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    for command in (configure, ["cmake", "--build", str(build_dir), "-j2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return build_dir


def toolkit_environment(build_dir, layout="newer"):
    """The variables that make a library search find one of the layouts as the installed CANN."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {LAYOUTS}")
    home = Path(build_dir) / "layouts" / layout
    (home / "opp").mkdir(exist_ok=True)
    return {
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_TOOLKIT_HOME": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "LD_LIBRARY_PATH": str(home / "lib64"),
    }


class Control:
    """What include/emu/control.h declares. Every emulated library in the process shares the one state behind it."""

    def __init__(self, build_dir):
        self._library = ctypes.CDLL(str(Path(build_dir) / "libemu_core.so"))
        text, number, size = ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
        declarations = {
            "emu_reset": (None,),
            "emu_set_soc": (None, text),
            "emu_set_version": (number, text),
            "emu_set_stream_mode": (number, text),
            "emu_set_stream_delay_us": (None, number),
            "emu_set_device_count": (None, number),
            "emu_set_device_memory": (None, size),
            "emu_set_require_opp_path": (None, number),
            "emu_fail_next": (None, text, number, text),
            "emu_fail_at": (None, text, number, number, text),
            "emu_clear_failures": (None,),
            "emu_live_count": (ctypes.c_long, text),
            "emu_live_bytes": (size,),
            "emu_calls": (ctypes.c_long, text),
            "emu_last_library": (text, text),
            "emu_library_calls": (ctypes.c_long, text),
            "emu_guard_violations": (ctypes.c_long,),
            "emu_misuse": (ctypes.c_long, text),
            "emu_misuse_log": (text,),
            "emu_report": (text,),
        }
        for name, (result, *arguments) in declarations.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def reset(self):
        self._library.emu_reset()

    def configure(self, *, soc=None, version=None, stream_mode=None, stream_delay_us=None, device_count=None,
                  device_memory=None, require_opp_path=None):
        if soc is not None:
            self._library.emu_set_soc(soc.encode())
        if version is not None and self._library.emu_set_version(version.encode()):
            raise ValueError(f"version {version!r}")
        if stream_mode is not None and self._library.emu_set_stream_mode(stream_mode.encode()):
            raise ValueError(f"stream mode {stream_mode!r}")
        if stream_delay_us is not None:
            self._library.emu_set_stream_delay_us(stream_delay_us)
        if device_count is not None:
            self._library.emu_set_device_count(device_count)
        if device_memory is not None:
            self._library.emu_set_device_memory(device_memory)
        if require_opp_path is not None:
            self._library.emu_set_require_opp_path(require_opp_path)

    def fail(self, function, code, text="", *, nth=1):
        """The nth call of `function` from now on fails. "aclnnAddLora.kernel" fails on the device, at synchronising."""
        self._library.emu_fail_at(function.encode(), nth, code, text.encode())

    def clear_failures(self):
        self._library.emu_clear_failures()

    def live(self, kind=None):
        """Objects of that kind that were made and not given back; None: of all kinds but contexts."""
        return self._library.emu_live_count(kind.encode() if kind else None)

    def live_bytes(self):
        return self._library.emu_live_bytes()

    def calls(self, function):
        return self._library.emu_calls(function.encode())

    def last_library(self, function):
        """Path of the library that `function` was last called in, "" if it never was."""
        return self._library.emu_last_library(function.encode()).decode()

    def library_calls(self, part):
        return self._library.emu_library_calls(part.encode())

    def guard_violations(self):
        return self._library.emu_guard_violations()

    def misuse(self, kind=None):
        return self._library.emu_misuse(kind.encode() if kind else None)

    def misuse_log(self):
        return self._library.emu_misuse_log().decode().splitlines()

    def report(self):
        return json.loads(self._library.emu_report().decode())
