"""``python -m chunkc.bench [COMMAND] [OPTIONS]``: without a command, the serving benchmark."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from chunkc.errors import ChunkcError

# command -> the module that has its DESCRIPTION, add_arguments(parser) and run(args) -> exit code
COMMANDS = {
    "serve": "chunkc.bench.serve",
    "plan": "chunkc.bench.plan",
    "kernels": "chunkc.bench.kernels",
    "steps": "chunkc.bench.steps",
    "multiplex": "chunkc.bench.multiplex",
    "peers": "chunkc.bench.peers",
    "gpu": "chunkc.bench.gpu",
}
DEFAULT_COMMAND = "serve"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"chunkc.bench: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark command. The exit code is 2 where the input is at fault; stderr says why."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = DEFAULT_COMMAND
    if arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
        if name not in COMMANDS:
            print(f"chunkc.bench: there is no command {name!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
            return 2
    command = importlib.import_module(COMMANDS[name])
    parser = _Parser(
        prog=f"python -m chunkc.bench {name}",
        description=f"{name}: {command.DESCRIPTION}",
        epilog=f"commands: {', '.join(COMMANDS)} (default: {DEFAULT_COMMAND})",
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        return command.run(args)
    except ChunkcError as error:
        print(f"chunkc.bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
