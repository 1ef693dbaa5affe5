"""The command line: files in, files out. Exit code 0, 1 (it failed; one line says why) or 2 (bad usage)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardcore.cli import (
    hot_rows,
    measurements,
    memory_tiers,
    plans,
    policies,
    problems,
    provisioning,
    published,
    replays,
    topologies,
)
from shardcore.cli.options import Formatter
from shardcore.collector import rare_collections
from shardcore.errors import ShardCoreError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardcore", description=__doc__,
                                     formatter_class=Formatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (plans, replays, problems, hot_rows, memory_tiers, measurements, policies, topologies,
                  provisioning, published):
        group.add_commands(commands)
    try:
        try:
            args = parser.parse_args(argv)
        finally:
            sys.stdout.flush()  # of help, whose reader may have gone, too
        _require_other(args)
        with rare_collections():
            args.command(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has what they wanted. Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the exit code of a shell for SIGPIPE
    except (ShardCoreError, OSError) as error:
        print(f"error: {error if isinstance(error, ShardCoreError) else ShardCoreError(str(error))}",
              file=sys.stderr)
        return 1
    # 130: the exit code of a shell for SIGINT.
    except KeyboardInterrupt:
        return 130
    return 0


def _require_other(args: argparse.Namespace) -> None:
    """Raise ShardCoreError if a file that the command writes is one that it reads, or writes besides."""
    written: list[tuple[str, Path]] = []
    read: list[tuple[str, Path]] = []
    for name, value in vars(args).items():
        found = written if name in args.outputs else read
        found += [(name, path) for path in (value if isinstance(value, list) else [value])
                  if isinstance(path, Path)]
    for i, (name, out) in enumerate(written):
        for other, path in read:
            if path.is_file() and out.is_file() and path.samefile(out):
                raise ShardCoreError(f"--{name} {out} is the {other} that is read; it needs to be another "
                                     "file")
        for other, path in written[:i]:
            if path.resolve() == out.resolve():
                raise ShardCoreError(f"--{other} and --{name} are both {out}; they need to be two files")
