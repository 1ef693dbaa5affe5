"""What the commands' arguments share: how a command is added, and which numbers are valid."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from shardcore.errors import ShardCoreError
from shardcore.schema import MOST_INT


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows an argument's default, if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def command(commands: argparse._SubParsersAction, run: Callable[[argparse.Namespace], None], summary: str,
            outputs: Sequence[str] = ("out",)) -> argparse.ArgumentParser:
    """The parser of a command. The command has the name of the function that runs it, with dashes.

    outputs: options that name what it writes. None of that may be what it reads.
    """
    parser = commands.add_parser(run.__name__.replace("_", "-"), help=summary, description=summary,
                                 formatter_class=Formatter)
    parser.set_defaults(command=run, outputs=outputs)
    return parser


def require_folder(out: Path) -> None:
    """Raise ShardCoreError if --out is a file. Called before long work, which would be lost."""
    if out.exists() and not out.is_dir():
        raise ShardCoreError(f"--out {out} is a file; it needs to be a folder")


def natural(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MOST_INT:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 0 to {MOST_INT}")
    return value


def amount(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MOST_INT:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 to {MOST_INT}")
    return value


def positive(kind: type) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        value = kind(text)
        if not 0 < value <= MOST_INT:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number up to {MOST_INT}")
        return value

    # argparse names the type in its message.
    parse.__name__ = kind.__name__
    return parse
