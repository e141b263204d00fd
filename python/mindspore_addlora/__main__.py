"""``python -m mindspore_addlora``: one module for each command."""

from __future__ import annotations

import argparse
import sys

from . import bench, info, selftest

COMMANDS = {"info": info, "bench": bench, "selftest": selftest}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that the arguments name, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mindspore_addlora")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(name, help=text.splitlines()[0], description=text)
        module.add_arguments(command)
    chosen = parser.parse_args(arguments)
    status: int = COMMANDS[chosen.command].run(chosen)
    return status


if __name__ == "__main__":
    sys.exit(main())
