"""The command line, made from dataclasses: each command is a function of one, with its options as fields.

Fields of type Argument[...] are positional, others are options. A field's declaration (core/validation.py) gives its
parser, range, choices, default and placeholder in the help. A field marked Flat holds a config of the library, whose
fields are options, too. The class's docstring is the command's description, and has the help of each field,
`name: text`. The mark Output shows that the command writes to this path, and Needs that another option has to be given.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
from shardcore.core.validation import (
    MOST_BYTES,
    Rule,
    annotation_metadata,
    describe_type,
    number_within,
    one_of,
    require,
    type_hints,
)
from shardcore.io.schema import MOST_INT

if TYPE_CHECKING:
    from shardcore.search.budget import Budget

MOST_GIB = MOST_BYTES >> 30
_FIELD = re.compile(r"^(\w+): (.+(?:\n  .+)*)\n?", re.M)
"""Lines of a field in a docstring. All but the first are indented."""


# --- declarations of fields, from which options are made ----------------------------------------------------


T = TypeVar("T")


class Flat(tuple[str, ...]):
    """Mark of a field that holds a config, some of whose fields are options: Flat(("seed", "repeats"))."""


POSITIONAL = object()
"""Mark of an option that a command takes by its place."""


@dataclasses.dataclass(frozen=True)
class Field:
    """Declaration of a command's option: a field of its options dataclass, with type, help and rules.

    kind: its type, without marks.
    marks: rules, Flat, POSITIONAL, and a text: the placeholder of an option.
    default: MISSING if it is required.
    """

    name: str
    kind: Any
    marks: tuple[Any, ...]
    default: Any

    @property
    def rules(self) -> list[Rule]:
        return [mark for mark in self.marks if isinstance(mark, Rule)]

    @property
    def flattened_fields(self) -> Sequence[str]:
        """Names of the nested config's fields that are command-line options."""
        return next((mark for mark in self.marks if isinstance(mark, Flat)), ())


@cache
def field_declarations(cls: type) -> Mapping[str, Field]:
    """Declarations of a dataclass's fields, by field name."""
    plain, hints = type_hints(cls), get_type_hints(cls, include_extras=True)
    found = {}
    for f in dataclasses.fields(cls):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        found[f.name] = Field(f.name, plain[f.name], annotation_metadata(hints[f.name]), default)
    return found


@cache
def option_declarations(cls: type) -> Mapping[str, Field]:
    """Declarations of a dataclass's command-line options: fields, with fields of type config flattened."""
    found: dict[str, Field] = {}
    for name, field in field_declarations(cls).items():
        for key in field.flattened_fields:
            found[key] = dataclasses.replace(
                field_declarations(field.kind)[key], default=getattr(field.default, key)
            )
        if not field.flattened_fields:
            found[name] = field
    return found


def build_config(cls: Any, values: Mapping[str, Any]) -> Any:
    """Instance of a dataclass, built from values of its options (see `option_declarations`)."""
    own = dict(values)
    for name, field in field_declarations(cls).items():
        if field.flattened_fields:
            own[name] = dataclasses.replace(
                field.default, **{key: own.pop(key) for key in field.flattened_fields}
            )
    return cls(**own)


# --- types of options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """Mark of a path that is written. Paths without it are read.

    replaced: names of files in it that are replaced, if the path is a folder. None: it is a file.
    """

    replaced: tuple[str, ...] | None = None


def _parse_duration(text: str) -> float:
    """Parse a duration such as 30s, 10min or 2h into seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30s, 10min or 2h")
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]]


def _parse_share(text: str) -> float:
    """Parse a share such as 1% or 0.01."""
    number, percent = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    share = _value_parser(float, ())(number) / percent
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it needs to be a share from 0% to 100%, such as 1%")
    return share


def parse_path(text: str) -> Path:
    # Python takes an empty path (a shell's unset variable) for the current folder.
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file or folder")
    return Path(text)


@dataclass(frozen=True)
class Needs:
    """Annotation of an option that is only useful together with one of several other options.

    others: names of those.
    words: what they are, for messages.
    """

    others: tuple[str, ...]
    words: str

    def __str__(self) -> str:
        return " or ".join(f"--{_dashed_name(other)}" for other in self.others)


@dataclass(frozen=True)
class Parser:
    """Mark of how an option's text becomes a value, if its type alone does not tell."""

    parse: Callable[[str], Any]


Argument = Annotated[T, POSITIONAL]
"""Argument[PlanFile]: a path that a command takes by its place."""
Natural = Annotated[int, number_within(0, MOST_INT)]
Positive = Annotated[int, number_within(1, MOST_INT)]
Amount = Annotated[float, number_within(0, MOST_INT)]
PositiveFloat = Annotated[float, number_within(0, MOST_INT, above=True)]
Duration = Annotated[float, Parser(_parse_duration)]
Share = Annotated[float, Parser(_parse_share), "P%"]
Gib = Annotated[float, number_within(0, MOST_GIB)]
PositiveGib = Annotated[float, number_within(0, MOST_GIB, above=True)]
ProblemFile = Annotated[Path, "PROBLEM.json"]
PlanFile = Annotated[Path, "PLAN.json"]
DatasetFolder = Annotated[Path, "DIR"]
Device = Literal["cpu", "cuda"]
Precision = Annotated[str, one_of(PRECISION_BYTES)]
Optimizer = Annotated[str, one_of(OPTIMIZERS)]


# --- groups of options that several commands have -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a command that searches.

    budget_s: seconds for all searches together
    budget_evals: plans to price in each search; the same seed then gives the same plan. A search makes one plan to
      start from in any case; on thousands of devices further ones count as plans, too
    within: share of the cost, such as 1%: the search ends once more trials would make the plan cheaper by less; without
      a budget 0.1%
    threads: cores that searches use, instead of all; save with --budget-s it changes no plan
    """

    EXCLUSIVE: ClassVar[tuple[tuple[str, ...], ...]] = (("budget_s", "budget_evals"),)
    budget_s: PositiveFloat | None = None
    budget_evals: Positive | None = None
    within: Share | None = None
    threads: Positive | None = None
    seed: Natural = 0

    def budget(self) -> Budget:
        """Search budget of --budget-evals, --budget-s, --within and --threads."""
        from shardcore.search.budget import Budget

        return Budget(self.budget_evals, self.budget_s, self.threads, self.within)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a command that prices.

    model: folder of a trained model; if weights of tables differ in precision, give the option for each
      precision
    hardware: in place of a model, a profile of published measurements, not of your machine: a name
      (`profile list`), or a file of `profile new` or `profile fit`
    """

    REQUIRED: ClassVar[tuple[tuple[str, ...], ...]] = (("model", "hardware"),)
    model: list[Path] | None = None
    hardware: Annotated[str, "PROFILE"] | None = None

    @property
    def source(self) -> str | list[Path]:
        """Profile name or model folders that the options give. [] if they give neither."""
        return (self.model or []) if self.hardware is None else self.hardware


# --- a command's parser -------------------------------------------------------------------------------------


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows an argument's default, if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default is None or action.default is False
        return action.help if unset else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # An example keeps its lines.
        return text if "\n" in text else super()._fill_text(text, width, indent)


def add_command(commands: argparse._SubParsersAction, name: str, options: type) -> argparse.ArgumentParser:
    """Add a command with the options of a dataclass to an argument parser. Returns the command's own parser.

    EXCLUSIVE and REQUIRED of the options' class are groups of names: at most one, or exactly one, of each may
    be given. EXAMPLE ends the help.
    """
    summary = " ".join(_FIELD.sub("", inspect.getdoc(options) or "").split())
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=getattr(options, "EXAMPLE", None),
        formatter_class=Formatter,
    )
    parser.set_defaults(options=options)
    group_of = {
        name: (names, required)
        for required in (False, True)
        for names in getattr(options, "REQUIRED" if required else "EXCLUSIVE", ())
        for name in names
    }
    # Made with their first option: argparse cannot print groups that are empty or in another order than
    # options.
    groups: dict[tuple[str, ...], argparse._MutuallyExclusiveGroup] = {}
    # Options of this command alone come before those that it shares with others.
    for field in sorted(dataclasses.fields(options), key=lambda f: f.name not in options.__annotations__):
        for key, declaration, text in _options_of_field(options, field.name):
            given: dict[str, Any] = {
                **_argparse_arguments(declaration),
                "help": text.replace("%", "%%"),
                **field.metadata,
            }
            option = f"--{_dashed_name(key)}"
            if POSITIONAL in declaration.marks:
                parser.add_argument(key, **given)
            elif key in group_of:
                names, needed = group_of[key]
                if names not in groups:
                    groups[names] = parser.add_mutually_exclusive_group(required=needed)
                groups[names].add_argument(option, dest=key, **given)
            else:
                parser.add_argument(
                    option, dest=key, required=declaration.default is dataclasses.MISSING, **given
                )
    return parser


def _options_of_field(options: type, name: str) -> Iterator[tuple[str, Field, str]]:
    """Name, declaration and help of the options of a field: one option, or several if the field holds a config."""
    field = field_declarations(options)[name]
    texts = _field_help_texts(field.kind if field.flattened_fields else options)
    for key in field.flattened_fields or (name,):
        option = option_declarations(options)[key]
        needed = "".join(f"with {mark}: " for mark in option.marks if isinstance(mark, Needs))
        yield key, option, f"{needed}{texts.get(key, '')}"


def _field_help_texts(cls: type) -> dict[str, str]:
    """Help texts by field name, from the docstrings of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        texts |= {name: " ".join(text.split()) for name, text in _FIELD.findall(inspect.getdoc(base) or "")}
    return texts


def _argparse_arguments(field: Field) -> dict[str, Any]:
    """Keyword arguments of argparse's add_argument for a declared field."""
    given: dict[str, Any] = {} if field.default is dataclasses.MISSING else {"default": field.default}
    if field.kind is bool:
        return given | {"action": "store_true"}
    kind = field.kind
    if NoneType in get_args(kind):
        [kind] = set(get_args(kind)) - {NoneType}
    if get_origin(kind) is list:
        given |= {"nargs": "+"} if POSITIONAL in field.marks else {"action": "append"}
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return given | {"choices": get_args(kind)}
    if choices := next((rule.known for rule in field.rules if rule.known), ()):
        return given | {"type": kind, "choices": tuple(choices)}
    if placeholders := [mark for mark in field.marks if type(mark) is str]:
        given["metavar"] = placeholders[0]
    parsers = [mark.parse for mark in field.marks if isinstance(mark, Parser)]
    return given | {
        "type": parsers[0] if parsers else parse_path if kind is Path else _value_parser(kind, field.rules)
    }


def _value_parser(kind: type, rules: Sequence[Rule]) -> Callable[[str], Any]:
    """Function that parses an option's text into a type and checks validation rules."""

    def parse_value(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            right = rules[0].right if rules else f"it needs {describe_type(kind)}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {describe_type(kind)}; {right}") from None
        for rule in rules:
            if not rule.admits(value):
                raise argparse.ArgumentTypeError(f"it is {text}; {rule.right}")
        return value

    return parse_value


def build_options(parsed: argparse.Namespace) -> Any:
    """Options dataclass of a command, from parsed arguments."""
    return build_config(
        parsed.options, {key: getattr(parsed, key) for key in option_declarations(parsed.options)}
    )


def output_options(options: type) -> dict[str, Output]:
    """Output marks of the options that name files or folders to write, by option name."""
    return {
        name: mark
        for name, field in field_declarations(options).items()
        for mark in field.marks
        if isinstance(mark, Output)
    }


def require_needed_options(options: Any) -> None:
    """Raise ShardCoreError for an option given without an option that it needs."""
    for name, field in field_declarations(type(options)).items():
        given = getattr(options, name)
        for needs in (mark for mark in field.marks if isinstance(mark, Needs)):
            if given is None or given is False or any(getattr(options, other) for other in needs.others):
                continue
            shown = [] if given is True else given if isinstance(given, list) else [given]
            option = " ".join(map(str, (f"--{_dashed_name(name)}", *shown)))
            raise ShardCoreError(f"{option} needs {needs}, {needs.words}")


# --- outputs are checked before the work --------------------------------------------------------------------


def require_writable_outputs(options: Any, also_read: Iterable[Path] = ()) -> None:
    """Raise ShardCoreError for an output that cannot be written, or would replace an input.

    It is called before the work, which would be lost otherwise. also_read: inputs that options only imply.
    """
    from shardcore.io.writing import require_writable
    from shardcore.plans.store import require_outside_versions

    written_by = output_options(type(options))
    given = [
        (name, found)
        for name, value in vars(options).items()
        for one in (value if isinstance(value, list) else [value])
        if (found := _local_path(one))
    ]
    read = [
        *((name, found) for name, found in given if name not in written_by),
        *(("file", found) for found in also_read),
    ]
    written: list[tuple[str, Path]] = []
    for name, out in ((name, found) for name, found in given if name in written_by):
        # With --each, a command writes files for each machine, so that its output is a folder.
        replaced = () if getattr(options, "each", None) else written_by[name].replaced
        require_writable(out, f"--{_dashed_name(name)}", folder=replaced is not None)
        for place in [out / file for file in replaced or ()] or [out]:
            require_outside_versions(place)
            for what, source in read:
                require(
                    not _would_replace(place, source),
                    f"--{_dashed_name(name)} {place} is {_in_folder_words(place, source)}the "
                    f"{_dashed_name(what)} that is read; it needs to be another file",
                )
            for other, before in written:
                require(
                    _real_path(place) != _real_path(before),
                    f"--{_dashed_name(other)} and --{_dashed_name(name)} are both {place}; "
                    "they need to be two files",
                )
            written.append((name, place))


def _dashed_name(name: str) -> str:
    return name.rstrip("_").replace("_", "-")  # from_, as `from` is a word of Python, becomes --from


def _local_path(value: object) -> Path | None:
    """Path of an option's value: a Path, or text that names an existing file or folder. None for other values."""
    if isinstance(value, str):
        text = value.removeprefix("file://")
        return Path(text) if text and os.path.exists(text) else None
    return value if isinstance(value, Path) else None


def _would_replace(place: Path, source: Path) -> bool:
    """Tell if writing to `place` would change the input file or folder `source`."""
    same = place.is_file() and source.is_file() and place.samefile(source)
    return same or _real_path(place) == _real_path(source) or bool(_in_folder_words(place, source))


def _in_folder_words(place: Path, source: Path) -> str:
    return "in " * (source.is_dir() and _real_path(source) in _real_path(place).parents)


def _real_path(path: Path) -> Path:
    """Resolve symbolic links of a path. Unlike Path.resolve, tolerates a link to itself."""
    return Path(os.path.realpath(path))
