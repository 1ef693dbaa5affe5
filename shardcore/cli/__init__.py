"""The command line: files in, files out. Exit code 0, 1 (it failed; one line says why) or 2 (bad usage)."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Any, TextIO

from shardcore import __version__
from shardcore.cli.commands import COMMANDS, GROUPS
from shardcore.cli.options import (
    Formatter,
    add_command,
    build_options,
    require_needed_options,
    require_writable_outputs,
)
from shardcore.core.errors import ShardCoreError, escape_unprintable
from shardcore.core.extras import explain_missing_extras
from shardcore.core.gc_pause import infrequent_gc


class _EscapedStream:
    """Text stream that escapes control characters, which names in input files may have."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.flush = stream.flush

    def write(self, text: str) -> int:
        return self.stream.write("\n".join(map(escape_unprintable, text.split("\n"))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def command_line_parser() -> argparse.ArgumentParser:
    """Command-line parser with all commands of `shardcore`."""
    parser = argparse.ArgumentParser(prog="shardcore", description=__doc__, formatter_class=Formatter)
    parser.add_argument("--version", action="version", version=f"shardcore {__version__}")
    groups = {"": parser.add_subparsers(required=True, metavar="COMMAND")}
    for name, (_, options) in COMMANDS.items():
        group, _, own_name = name.rpartition(" ")
        if group not in groups:
            summary = GROUPS[group]
            inner = groups[""].add_parser(group, help=summary, description=summary, formatter_class=Formatter)
            groups[group] = inner.add_subparsers(required=True, metavar="COMMAND")
        add_command(groups[group], own_name, options).set_defaults(command=name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            parsed = command_line_parser().parse_args(argv)
        finally:
            sys.stdout.flush()  # here, as the reader of help may be gone, too
        options = build_options(parsed)
        require_needed_options(options)
        require_writable_outputs(options)
        with (
            infrequent_gc(),
            explain_missing_extras(),
            redirect_stdout(_EscapedStream(sys.stdout)),
            redirect_stderr(_EscapedStream(sys.stderr)),
        ):
            module = import_module(f"shardcore.cli.{COMMANDS[parsed.command][0]}")
            getattr(module, re.sub("[ -]", "_", parsed.command))(options)
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
