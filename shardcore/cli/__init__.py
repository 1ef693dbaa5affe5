"""The command line: files in, files out. Exit code 0, 1 (it failed; one line says why) or 2 (bad usage)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, TextIO

from shardcore import __version__
from shardcore.cli import (
    job,
    measure,
    measurements,
    plans,
    policies,
    problems,
    profiles,
    published,
    replays,
    topologies,
)
from shardcore.cli.options import Formatter, build, require_outputs
from shardcore.core.errors import ShardCoreError, escaped
from shardcore.core.extras import extras_named
from shardcore.core.gc_pause import rare_collections


class _Printable:
    """A text stream that escapes control characters, which names in other people's files may have."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.flush = stream.flush

    def write(self, text: str) -> int:
        return self.stream.write("\n".join(map(escaped, text.split("\n"))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def parser_of_all() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="shardcore", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--version", action="version", version=f"shardcore {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (
        plans,
        replays,
        problems,
        measure,
        measurements,
        policies,
        profiles,
        topologies,
        published,
        job,
    ):
        group.command.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            parsed = parser_of_all().parse_args(argv)
        finally:
            sys.stdout.flush()  # here, as the reader of help may be gone, too
        options = build(parsed)
        require_outputs(options)
        with (
            rare_collections(),
            extras_named(),
            redirect_stdout(_Printable(sys.stdout)),
            redirect_stderr(_Printable(sys.stderr)),
        ):
            parsed.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted. Python would complain again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the exit code of a shell for SIGPIPE
    except (ShardCoreError, OSError) as error:
        # By !s, several faults have a line each.
        print(
            f"error: {error if isinstance(error, ShardCoreError) else ShardCoreError(str(error))!s}",
            file=sys.stderr,
        )
        return 1
    # 130: the exit code of a shell for SIGINT.
    except KeyboardInterrupt:
        return 130
    return 0
