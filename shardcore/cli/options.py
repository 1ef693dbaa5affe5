"""What the commands' arguments share: how a command is added, and which numbers are valid."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_BYTES
from shardcore.io.schema import MOST_INT

MOST_GIB = MOST_BYTES >> 30


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows an argument's default, if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def command(
    commands: argparse._SubParsersAction,
    run: Callable[[argparse.Namespace], None],
    summary: str,
    outputs: Sequence[str] = ("out",),
    folders: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> argparse.ArgumentParser:
    """The parser of a command. The command has the name of the function that runs it, with dashes.

    outputs: options that name files that it writes. Every other path is one that it reads.
    folders: options that name folders that it writes, each with the names of files there that it replaces.
    """
    parser = commands.add_parser(
        run.__name__.replace("_", "-"), help=summary, description=summary, formatter_class=Formatter
    )
    parser.register("type", Path, path)
    parser.set_defaults(command=run, folders=folders, outputs=dict.fromkeys(outputs, ("",)) | dict(folders))
    return parser


def add_budget(p: argparse._ActionsContainer, evals: int | None = None) -> None:
    """Options of how long to search. evals: default."""
    p.add_argument("--budget-s", type=positive(float), help="seconds for all searches together")
    p.add_argument(
        "--budget-evals",
        type=positive(int),
        default=evals,
        help="plans to price in each search; the same seed then gives the same plan",
    )


def path(text: str) -> Path:
    """A path. Python takes an empty one, of a variable that is not set, for the folder where it runs."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file or folder")
    return Path(text)


def require_outputs(args: argparse.Namespace, also_read: Iterable[Path] = ()) -> None:
    """Raise ShardCoreError for an output that cannot be written, or would replace what the command reads.

    Called before the work, which would be lost. also_read: paths that its arguments only imply.
    """
    from shardcore.io.writing import require_writable

    given = [
        (name, found)
        for name, value in vars(args).items()
        for one in (value if isinstance(value, list) else [value])
        if (found := _local(one))
    ]
    read = [(name, found) for name, found in given if name not in args.outputs]
    read += [("file", found) for found in also_read]
    written: list[tuple[str, Path]] = []
    for name, out in ((name, found) for name, found in given if name in args.outputs):
        require_writable(out, f"--{_dashed(name)}", folder=name in args.folders)
        for place in [out / file for file in args.outputs[name]] or [out]:
            for what, source in read:
                if _replaces(place, source):
                    raise ShardCoreError(
                        f"--{_dashed(name)} {place} is {_in(place, source)}the "
                        f"{_dashed(what)} that is read; it needs to be another file"
                    )
            for other, before in written:
                if _real(place) == _real(before):
                    raise ShardCoreError(
                        f"--{_dashed(other)} and --{_dashed(name)} are both {place}; "
                        "they need to be two files"
                    )
            written.append((name, place))


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _local(value: object) -> Path | None:
    """The path that an argument means: a Path, or text that names what is there."""
    if isinstance(value, str):
        text = value.removeprefix("file://")
        return Path(text) if text and os.path.exists(text) else None
    return value if isinstance(value, Path) else None


def _replaces(place: Path, source: Path) -> bool:
    """Tell if writing to a path would change a file or folder that is read."""
    if place.is_file() and source.is_file() and place.samefile(source):
        return True
    return _real(place) == _real(source) or bool(_in(place, source))


def _in(place: Path, source: Path) -> str:
    return "in " * (source.is_dir() and _real(source) in _real(place).parents)


def _real(path: Path) -> Path:
    """The path without links. Path.resolve fails for a link that leads to itself."""
    return Path(os.path.realpath(path))


def natural(text: str) -> int:
    return _number(text, int, lambda value: 0 <= value <= MOST_INT, f"a whole number of 0 to {MOST_INT}")


def amount(text: str, most: int = MOST_INT) -> float:
    return _number(text, float, lambda value: 0 <= value <= most, f"a number of 0 to {most}")


def positive(kind: type, most: int = MOST_INT) -> Callable[[str], int | float]:
    whole = "whole " * (kind is int)
    return lambda text: _number(
        text, kind, lambda value: 0 < value <= most, f"a positive {whole}number up to {most}"
    )


def _number(text: str, kind: type, is_good: Callable[[Any], bool], right: str) -> Any:
    with suppress(ValueError):
        if is_good(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {right}")


def gib(text: str) -> float:
    return amount(text, MOST_GIB)


positive_gib = positive(float, MOST_GIB)
