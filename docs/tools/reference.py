"""Reference pages that are made from the code: the library, the command line, schemas of files."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import shardcore
from shardcore.cli import command_line_parser
from shardcore.io.envelope import VERSIONS
from shardcore.report.text import markdown_table

FIELD = re.compile(r"^([a-z]\w*(?:, [a-z]\w*)*): (.+(?:\n {2,}\S.*)*)\n?", re.M)
"""A field's lines in a docstring. The second and further ones are indented."""

MODULES = {
    "Files": ("shardcore.io.files", "shardcore.io.hot_ids", "shardcore.io.row_counts"),
    "Decisions before a search": (
        "shardcore.search.decisions.driver",
        "shardcore.search.decisions.groups",
        "shardcore.search.decisions.memory_tiers",
        "shardcore.search.decisions.hot_rows",
        "shardcore.search.decisions.towers",
        "shardcore.search.decisions.provision",
        "shardcore.plans.one_cut",
    ),
    "Plans over time": ("shardcore.plans.replan", "shardcore.plans.diff", "shardcore.plans.drift"),
    "TorchRec": (
        "shardcore.torchrec.planner",
        "shardcore.torchrec.perf_model",
        "shardcore.torchrec.sharding_plan",
        "shardcore.torchrec.plan_files",
        "shardcore.torchrec.moves.reshard",
        "shardcore.torchrec.moves.follow",
        "shardcore.torchrec.moves.checkpoints",
        "shardcore.torchrec.hot_cold",
        "shardcore.torchrec.profiler",
    ),
    "Data": ("shardcore.step.access", "shardcore.tables.deduplication"),
    "Conformance": (
        "shardcore.testing.sharders",
        "shardcore.testing.cost_models",
        "shardcore.testing.decisions",
    ),
}
"""Modules that pages for users speak of. Names of each that have a docstring are listed."""

RECORDS: dict[str, tuple[str, ...]] = {
    "problem": (
        "core.types:Problem",
        "core.types:Table",
        "core.access_statistics:Reuse",
        "core.access_statistics:RowShares",
        "core.access_statistics:ManagedCollision",
        "core.topology:Topology",
        "core.topology:Device",
        "core.links:Link",
        "core.tiers:Memory",
        "core.constraints:Constraints",
        "core.job:Job",
    ),
    "pool": ("io.files:_Pool",),
    "plan": ("io.files:_Plan", "core.types:Placement", "core.types:Shard"),
    "grouped-plan": ("io.files:_GroupedPlan", "step.sharding_groups:Grouping"),
    "model": ("cost.neural:_Meta", "core.types:Setting"),
    "policy": ("search.learned.policy:_Meta",),
    "towers": ("io.towers:Towers",),
    "offers": ("search.decisions.provision:Offers", "search.decisions.provision:Offer"),
    "hot-ids": ("io.hot_ids:_Meta",),
    "row-counts": ("io.row_counts:RowCounts",),
    "replays": ("io.replays:_Body", "io.replays:_Row"),
    "decision": ("plans.decisions:Decision",),
    "job": ("io.job_folder:JobFacts",),
    "traced": ("io.traced_samples:TracedSample",),
    "torchrec-plan": ("torchrec.plan_files:_File",),
    "dmp-collection": ("torchrec.dmp_collection:_File", "torchrec.dmp_collection:Arguments"),
    "profile": ("cost.profile:Profile", "cost.profile:ProfileRate"),
    "network": ("cost.profile:Network", "cost.profile:ProfileRate"),
    "move-rates": ("cost.move_rates:MoveRates",),
    "job-report": ("plans.followed:JobReport",),
}
"""Records of each schema, the outermost first: room and module, and class."""


def pages() -> dict[str, str]:
    """Text of each page, by its address in the site."""
    return {
        "reference/library.md": library(),
        "reference/modules.md": modules(),
        "reference/commands.md": commands(),
        "reference/schemas.md": schemas(),
    }


# --- the library ------------------------------------------------------------------------------------------


def library() -> str:
    """Page of all names of `import shardcore`."""
    parts = ["# The library\n\nNames of `import shardcore`. `help(shardcore.NAME)` says the same."]
    for name in sorted(shardcore.__all__, key=str.lower):
        noun = getattr(shardcore, name)
        named = inspect.isclass(noun) or inspect.isfunction(noun)  # SHARDERS is not
        home = noun.__module__ if named else "shardcore.search.sharders"
        options = f"    options:\n      heading: {name}\n      toc_label: {name}"
        parts.append(f"::: {home}.{noun.__name__ if named else name}\n{options}")
    return "\n\n".join(parts) + "\n"


def modules() -> str:
    """Modules beyond `import shardcore`."""
    parts = ["# More modules\n\nModules that the guides speak of. Import what you need from them."]
    for title, names in MODULES.items():
        parts.append(f"## {title}")
        for name in names:
            import_module(name)
            parts.append(f"::: {name}")
    return "\n\n".join(parts) + "\n"


# --- the command line ---------------------------------------------------------------------------------------


def commands() -> str:
    """All commands with their options, as their parsers have them."""
    entries = list(parsers(command_line_parser()))
    index = markdown_table(
        ("command", "does"),
        [(f"[`{name}`](#{anchor(name)})", _summary(p)) for name, p in entries],
    )
    return (
        "\n\n".join(
            [
                "# Commands",
                "`shardcore COMMAND -h` shows the same. `python -m shardcore` is the long form. The exit code is 0, "
                "1 (one line says why) or 2 (bad usage).",
                index,
                *(_command(name, p) for name, p in entries),
            ]
        )
        + "\n"
    )


def anchor(name: str) -> str:
    """Anchor of a command's heading."""
    return f"shardcore-{name.replace(' ', '-')}"


def parsers(
    parser: argparse.ArgumentParser, prefix: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command and its parser: those of groups as `job read`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(inner, f"{prefix} {name}".strip())
            return
    yield prefix, parser


def _summary(parser: argparse.ArgumentParser) -> str:
    return _cell((parser.description or "").partition(". ")[0].rstrip("."))


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    rows = [_option(a) for a in parser._actions if not isinstance(a, argparse._HelpAction)]
    example = [f"```text\n{parser.epilog}\n```"] if parser.epilog else []
    return "\n\n".join(
        [f"## shardcore {name}", _cell(parser.description or ""), f"```text\n{usage}\n```"]
        + ([markdown_table(("argument", "default", "meaning"), rows)] if rows else [])
        + example
    )


def _option(action: argparse.Action) -> tuple[str, str, str]:
    name = ", ".join(action.option_strings) or action.dest
    if action.nargs != 0 and action.option_strings:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        name += f" {action.metavar or choices or action.dest.upper()}"
    unset = action.default in (None, False, argparse.SUPPRESS)
    needed = "needed" if action.required else ""
    default = needed if unset else f"`{action.default}`"
    return f"`{name}`", default, _cell((action.help or "").replace("%%", "%"))


# --- schemas ------------------------------------------------------------------------------------------------


def schemas() -> str:
    """Records of each file, with their fields."""
    parts = [
        "# Schemas of files",
        "Records of each file with `schema` and `version`, from the classes that read them. "
        "[Files](../formats.md) says who writes and reads each. A problem's file writes some fields in another form: "
        "[its keys](../plan_problem.md#from-a-model-to-the-file).",
        markdown_table(
            ("schema", "version"),
            [(f"[`shardcore/{name}`](#shardcore{name})", v) for name, v in VERSIONS.items()],
        ),
    ]
    for name in VERSIONS:
        parts.append(f"## shardcore/{name}")
        for place in RECORDS[name]:
            parts += _record(place)
    return "\n\n".join(parts) + "\n"


def _record(place: str) -> Iterator[str]:
    module, _, name = place.partition(":")
    cls = getattr(import_module(f"shardcore.{module}"), name)
    text, words = inspect.getdoc(cls) or "", field_texts(cls)
    summary = text.partition("\n")[0] if not text.startswith(f"{name}(") else ""
    yield f"### {name.lstrip('_')} of {module}\n\n{_cell(summary)}"
    rows = [
        (f"`{f.name}`", _type(f), _default(f), _cell(words.get(f.name, ""))) for f in dataclasses.fields(cls)
    ]
    yield markdown_table(("field", "type", "default", "meaning"), rows)


def field_texts(cls: type) -> dict[str, str]:
    """Help texts of a class's fields by name, from its docstring and those of its bases."""
    return {
        name: " ".join(text.split())
        for base in reversed(cls.__mro__)
        for names, text in FIELD.findall(inspect.getdoc(base) or "")
        for name in names.split(", ")
    }


def _type(field: dataclasses.Field) -> str:
    name = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    # Without the check of an annotated type: Annotated[int, within(1, 9)].
    name = re.sub(r"^Annotated\[(.*?), .*\]$", r"\1", name)
    return f"`{name}`".replace("|", "or")


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"


def _cell(text: Any) -> str:
    """Text whose characters mean themselves in Markdown, on one line."""
    return re.sub(r"([<>*_\[\]])", r"\\\1", " ".join(str(text).split()))


def field_list(text: str) -> str:
    """A docstring whose lines `name: text` are a list."""

    def item(match: re.Match) -> str:
        names = ", ".join(f"`{name}`" for name in match[1].split(", "))
        return f"- {names}: {' '.join(match[2].split())}\n"

    return _spaced(FIELD.sub(item, text).splitlines())


def _spaced(lines: Iterable[str]) -> str:
    """Lines with an empty one before each list."""
    made: list[str] = []
    for line in lines:
        if line.startswith("- ") and made and made[-1] and not made[-1].startswith("- "):
            made.append("")
        made.append(line)
    return "\n".join(made)
