"""The command line, made from dataclasses: each command has one, with its options as fields.

Fields before `KW_ONLY` are positional, others are options. A field's type gives its parser, its choices and
its placeholder in the help. The class's docstring is the command's description, and has the help of each
field, `name: text`. The mark Output in a type shows that the command writes to this path.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import OPTIMIZERS, PRECISION_BYTES
from shardcore.core.validation import MOST_BYTES
from shardcore.io.schema import MOST_INT

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from shardcore.search.budget import Budget

MOST_GIB = MOST_BYTES >> 30
_FIELD = re.compile(r"^(\w+): (.+(?:\n  .+)*)\n?", re.M)
"""Lines of a field in a docstring. All but the first are indented."""


# --- types of options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """Mark of a path that is written. Paths without it are read.

    replaced: names of files in it that are replaced, if the path is a folder. None: it is a file.
    """

    replaced: tuple[str, ...] | None = None


def _number(kind: type, most: int, positive: bool = False) -> Callable[[str], int | float]:
    """A parser of numbers from 0 to `most`. positive: without 0."""
    number = f"{'whole ' * (kind is int)}number"
    expected = f"a positive {number} up to {most}" if positive else f"a {number} of 0 to {most}"

    def parse(text: str) -> int | float:
        with suppress(ValueError):
            if 0 <= (value := kind(text)) <= most and (value or not positive):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return parse


def _duration(text: str) -> float:
    """Seconds of a text such as 10min."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30s, 10min or 2h")
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]]


def path(text: str) -> Path:
    # Python takes an empty path (a shell's unset variable) for the current folder.
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file or folder")
    return Path(text)


Natural = Annotated[int, _number(int, MOST_INT)]
Positive = Annotated[int, _number(int, MOST_INT, positive=True)]
Amount = Annotated[float, _number(float, MOST_INT)]
PositiveFloat = Annotated[float, _number(float, MOST_INT, positive=True)]
Duration = Annotated[float, _duration]
Gib = Annotated[float, _number(float, MOST_GIB)]
PositiveGib = Annotated[float, _number(float, MOST_GIB, positive=True)]
ProblemFile = Annotated[Path, "PROBLEM.json"]
PlanFile = Annotated[Path, "PLAN.json"]
DatasetFolder = Annotated[Path, "DIR"]
Device = Literal["cpu", "cuda"]
Precision = Annotated[str, tuple(PRECISION_BYTES)]
Optimizer = Annotated[str, tuple(OPTIMIZERS)]


# --- groups of options that several commands have -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a command that searches.

    budget_s: seconds for all searches together
    budget_evals: plans to price in each search; the same seed then gives the same plan. A search makes one plan to
      start from in any case; on thousands of devices further ones count as plans, too
    threads: cores that searches use, instead of all; with --budget-evals it changes no plan
    """

    EXCLUSIVE: ClassVar[tuple[tuple[str, ...], ...]] = (("budget_s", "budget_evals"),)
    budget_s: PositiveFloat | None = None
    budget_evals: Positive | None = None
    threads: Positive | None = None
    seed: Natural = 0

    def budget(self) -> Budget:
        """The budget that the options ask for."""
        from shardcore.search.budget import Budget

        return Budget(self.budget_evals, self.budget_s, self.threads)


# --- a command's parser -------------------------------------------------------------------------------------

Options = TypeVar("Options", bound="DataclassInstance")


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows an argument's default, if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default is None or action.default is False
        return action.help if unset else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # An example keeps its lines.
        return text if "\n" in text else super()._fill_text(text, width, indent)


def add_command(
    commands: argparse._SubParsersAction, options: type[Options], run: Callable[[Options], object]
) -> None:
    """Add a command. Its name is that of the function that runs it, with dashes.

    EXCLUSIVE and REQUIRED of the options' class are groups of names: at most one, or exactly one, of each may
    be given. EXAMPLE ends the help.
    """
    texts: dict[str, str] = {}
    for cls in reversed(options.__mro__):
        texts |= {name: " ".join(text.split()) for name, text in _FIELD.findall(inspect.getdoc(cls) or "")}
    summary = " ".join(_FIELD.sub("", inspect.getdoc(options) or "").split())
    name = _dashed(run.__name__)
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=getattr(options, "EXAMPLE", None),
        formatter_class=Formatter,
    )
    parser.set_defaults(run=run, options=options)
    group_of = {
        name: (names, required)
        for required in (False, True)
        for names in getattr(options, "REQUIRED" if required else "EXCLUSIVE", ())
        for name in names
    }
    # Made with their first option: argparse cannot print groups that are empty or in another order than
    # options.
    groups: dict[tuple[str, ...], argparse._MutuallyExclusiveGroup] = {}
    hints = get_type_hints(options, include_extras=True)
    # Options of this command alone come before those that it shares with others.
    for field in sorted(dataclasses.fields(options), key=lambda f: f.name not in options.__annotations__):
        given: dict[str, Any] = _argument(field, hints[field.name]) | {
            "help": texts.get(field.name, "").replace("%", "%%")
        }
        option = f"--{_dashed(field.name)}"
        if not field.kw_only:
            parser.add_argument(field.name, **given)
        elif field.name in group_of:
            names, required = group_of[field.name]
            if names not in groups:
                groups[names] = parser.add_mutually_exclusive_group(required=required)
            groups[names].add_argument(option, dest=field.name, **given)
        else:
            required = field.default is dataclasses.MISSING
            parser.add_argument(option, dest=field.name, required=required, **given)


def _argument(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """Arguments of argparse's add_argument, from a field and its type."""
    given: dict[str, Any] = {}
    if field.default is not dataclasses.MISSING:
        given["default"] = field.default
    if hint is bool:
        return given | {"action": "store_true"}
    if NoneType in get_args(hint):
        [hint] = set(get_args(hint)) - {NoneType}
    if get_origin(hint) is list:
        given |= {"action": "append"} if field.kw_only else {"nargs": "+"}
        [hint] = get_args(hint)
    if get_origin(hint) is Literal:
        return given | {"choices": get_args(hint)}
    kind, *marks = (get_args(hint)) if get_origin(hint) is Annotated else (hint,)
    given["type"] = path if kind is Path else kind
    for mark in marks:
        if isinstance(mark, str):
            given["metavar"] = mark
        elif isinstance(mark, tuple):
            given["choices"] = mark
        elif callable(mark):
            given["type"] = mark
    return given | dict(field.metadata)


def build(parsed: argparse.Namespace) -> Any:
    """The options of a command, from what was parsed."""
    cls = parsed.options
    return cls(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(cls)})


def outputs(options: type) -> dict[str, Output]:
    """Options of a class that name files or folders that the command writes."""
    return {
        name: mark
        for name, hint in get_type_hints(options, include_extras=True).items()
        for mark in _marks(hint)
        if isinstance(mark, Output)
    }


def _marks(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    for inner in get_args(hint):
        yield from _marks(inner)


# --- outputs are checked before the work --------------------------------------------------------------------


def require_outputs(options: Any, also_read: Iterable[Path] = ()) -> None:
    """Raise ShardCoreError for an output that cannot be written, or would replace an input.

    It is called before the work, which would be lost otherwise. also_read: inputs that options only imply.
    """
    from shardcore.io.writing import require_writable
    from shardcore.plans.store import require_elsewhere

    written_by = outputs(type(options))
    given = [
        (name, found)
        for name, value in vars(options).items()
        for one in (value if isinstance(value, list) else [value])
        if (found := _local(one))
    ]
    read = [
        *((name, found) for name, found in given if name not in written_by),
        *(("file", found) for found in also_read),
    ]
    written: list[tuple[str, Path]] = []
    for name, out in ((name, found) for name, found in given if name in written_by):
        replaced = written_by[name].replaced
        require_writable(out, f"--{_dashed(name)}", folder=replaced is not None)
        for place in [out / file for file in replaced or ()] or [out]:
            require_elsewhere(place)
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
    return name.rstrip("_").replace("_", "-")  # from_, as `from` is a word of Python, becomes --from


def _local(value: object) -> Path | None:
    """The path that an argument means: a Path, or text that names an existing file or folder."""
    if isinstance(value, str):
        text = value.removeprefix("file://")
        return Path(text) if text and os.path.exists(text) else None
    return value if isinstance(value, Path) else None


def _replaces(place: Path, source: Path) -> bool:
    """Tell if writing to a path would change a file or folder that is read."""
    same = place.is_file() and source.is_file() and place.samefile(source)
    return same or _real(place) == _real(source) or bool(_in(place, source))


def _in(place: Path, source: Path) -> str:
    return "in " * (source.is_dir() and _real(source) in _real(place).parents)


def _real(path: Path) -> Path:
    """The path without links. Unlike Path.resolve, it takes a link that leads to itself."""
    return Path(os.path.realpath(path))
