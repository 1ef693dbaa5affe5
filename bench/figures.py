"""Take all figures of README and docs/benchmarks again, one entry of bench/figures.toml after another.

    make figures                                        unattended; the same again goes on where it ended
    python -m bench.figures --list                      what there is, and about how long it takes
    python -m bench.figures --only search bounds        some of them, with what they need
    python -m bench.figures --with inputs=FOLDER        with code that is not part of ShardCore
    make reproduce                                      the headlines, with verdicts: those of --headlines

Each entry has a folder below --out: output.md has what its commands printed, errors.log what they said on the
way, done.json the commit, the machine, when and how long. An entry that is done at this commit is not done
again. One that was cut off goes on where its benches can. One that fails does not stop the others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import string
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import common
from shardcore.core.errors import ShardCoreError
from shardcore.io import writing
from shardcore.io.schema import build_record
from shardcore.measure import hardware
from shardcore.report.text import text_table
from tasks.commit import git_commit

TABLE = Path(__file__).with_suffix(".toml")
DONE, GOING = "done.json", "going.json"


@dataclass(frozen=True)
class Headline:
    """A figure that is taken again, and the interval in which it has to be.

    name: name of the figure, for readers.
    pattern: regular expression whose only group is the figure in output.md.
    low, high: ends of the interval, which includes both.
    """

    name: str
    pattern: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if re.compile(self.pattern).groups != 1 or self.low > self.high:
            raise ShardCoreError(
                f"headline {self.name!r} has pattern {self.pattern!r} and {self.low:g} to {self.high:g}; it needs one "
                "group, and an interval"
            )

    def verdict(self, output: str) -> tuple[str, str]:
        """Value of the headline in an output, and "within", "OUTSIDE" or "MISSING"."""
        found = re.search(self.pattern, output, re.MULTILINE)
        return (
            (f"{float(found[1]):.4g}", "within" if self.low <= float(found[1]) <= self.high else "OUTSIDE")
            if found
            else ("-", "MISSING")
        )


@dataclass(frozen=True)
class Figure:
    """Entry of bench/figures.toml: the commands that make a figure, their inputs and headlines."""

    name: str
    page: str
    commands: tuple[str, ...]
    minutes: float
    root: bool = False
    headlines: tuple[Headline, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "commands", tuple(self.commands))

    @property
    def placeholders(self) -> set[str]:
        """Placeholder names in the figure's commands, except {out}."""
        fields = (field for text in self.commands for _, field, _, _ in string.Formatter().parse(text))
        return {field for field in fields if field} - {"out"}

    @property
    def dependencies(self) -> set[str]:
        return {field for field in self.placeholders if not field.startswith("with[")}

    @property
    def required_folders(self) -> set[str]:
        """Names of input folders that --with has to give."""
        return {field[len("with[") : -1] for field in self.placeholders - self.dependencies}


def read_figures(path: Path) -> list[Figure]:
    """Read the figures of a TOML file. Raises ShardCoreError for a figure listed before its dependencies."""
    found: list[Figure] = []
    for entry in tomllib.loads(path.read_text())["figure"]:
        one = build_record(Figure, entry, f"{path.name}: {entry.get('name')}")
        if missing := one.dependencies - {before.name for before in found}:
            raise ShardCoreError(f"{path.name}: {one.name} needs {min(missing)!r}, which is not before it")
        found.append(one)
    return found


def figures_with_dependencies(figures: Sequence[Figure], names: Iterable[str]) -> list[Figure]:
    """Figures of some names with their dependencies, in order. Raises ShardCoreError for an unknown name."""
    by_name, wanted, left = {f.name: f for f in figures}, set(), list(names)
    while left:
        name = left.pop()
        if name not in by_name:
            raise ShardCoreError(f"there is no figure {name!r}; there are {', '.join(by_name)}")
        wanted.add(name)
        left += by_name[name].dependencies - wanted
    return [f for f in figures if f.name in wanted]


def take_figures(figures: Sequence[Figure], out: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Run the commands that give published figures, each in a folder of its own below `out`. Returns the outcome of
    each by name.
    """
    commit, became = git_commit(), dict[str, str]()
    left = sum(f.minutes for f in figures)
    for i, figure in enumerate(figures, 1):
        said = f"[{i} of {len(figures)}] {figure.name}"
        # Done by the same commands, at the same commit.
        if _recorded_run(out / figure.name / DONE) == {"commit": commit, "commands": list(figure.commands)}:
            became[figure.name] = "done before"
        elif why := _missing_reason(figure, given, became):
            became[figure.name] = f"skipped: {why}"
        else:
            print(f"{said}: about {figure.minutes:g} min; {left:g} min for all that are left", flush=True)
            became[figure.name] = _take_figure(figure, out, given, commit)
        left -= figure.minutes
        print(f"{said}: {became[figure.name]}", flush=True)
    return became


def headline_verdicts(figures: Sequence[Figure], out: Path) -> list[tuple[str, str, str, str]]:
    """Headline, value, expected interval and verdict, for each headline of the figures."""
    rows = []
    for figure in figures:
        output = out / figure.name / "output.md"
        text = output.read_text() if (out / figure.name / DONE).exists() else ""
        for headline in figure.headlines:
            value, verdict = headline.verdict(text)
            rows.append((headline.name, value, f"{headline.low:g} to {headline.high:g}", verdict))
    return rows


def _recorded_run(path: Path) -> dict[str, Any] | None:
    """Recorded commit and commands of a figure's run. None if not recorded."""
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return {"commit": found["commit"], "commands": found["commands"]}


def _missing_reason(figure: Figure, given: Mapping[str, str], became: Mapping[str, str]) -> str:
    """Why a figure cannot be run. "" if its inputs are complete."""
    if missing := sorted(figure.required_folders - given.keys()):
        return f"needs --with {missing[0]}=FOLDER"
    if figure.root and os.geteuid():
        return "emulates hosts, which needs root"
    without = [name for name in sorted(figure.dependencies) if not became[name].startswith("done")]
    return f"needs {without[0]}, which is not done" if without else ""


def _take_figure(figure: Figure, out: Path, given: Mapping[str, str], commit: str) -> str:
    folder, began = (out / figure.name).resolve(), time.time()
    now = {"commit": commit, "commands": list(figure.commands)}
    if folder.exists() and _recorded_run(folder / GOING) != now:
        shutil.rmtree(folder)  # of another commit
    folder.mkdir(parents=True, exist_ok=True)
    writing.write_json(folder / GOING, now)
    places = {name: str((out / name).resolve()) for name in figure.dependencies}
    with open(folder / "output.md", "w") as printed, open(folder / "errors.log", "a") as errors:
        for command in figure.commands:
            printed.write(f"    {command}\n\n")
            printed.flush()
            run = command.format(out=folder, **places, **{"with": given})
            code = subprocess.run(
                ["bash", "-c", run],
                stdout=printed,
                stderr=errors,
                env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            ).returncode
            if code:
                return f"failed with code {code}: {folder}/errors.log"
            printed.write("\n")
    writing.write_json(
        folder / DONE,
        {
            **now,
            "hardware": hardware.hardware_name("cpu"),
            "cores": os.cpu_count(),
            "began_unix_s": round(began),
            "seconds": round(time.time() - began, 1),
        },
    )
    return f"done in {(time.time() - began) / 60:.1f} min"


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.bench_parser(
        __doc__,
        out=Path(".figures"),
        headlines=(False, "those with an interval, and a verdict on each"),
        list=(False, "what there is"),
        table=(TABLE, "of the figures"),
    )
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--with", dest="given", action="append", default=[], metavar="NAME=FOLDER")
    args = parser.parse_args(argv)
    try:
        figures = read_figures(args.table)
        if args.headlines:
            figures = figures_with_dependencies(figures, [f.name for f in figures if f.headlines])
        figures = figures_with_dependencies(figures, args.only) if args.only else figures
        given = dict(_parse_name_and_folder(text) for text in args.given)
        if args.list:
            print(
                text_table(
                    ("figure", "minutes", "page"), [(f.name, f"{f.minutes:g}", f.page) for f in figures]
                )
            )
            return 0
        became = take_figures(figures, args.out, given)
    except ShardCoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n" + text_table(("figure", "became"), list(became.items())))
    failed = any(said.startswith("failed") or said.endswith("not done") for said in became.values())
    if args.headlines:
        rows = headline_verdicts(figures, args.out)
        kept = sum(verdict == "within" for *_, verdict in rows)
        print("\n" + text_table(("headline", "figure", "interval", "verdict"), rows))
        print(f"\n{kept} of {len(rows)} within their intervals, all at commit {git_commit()}")
        failed = failed or kept < len(rows)
    return int(failed)


def _parse_name_and_folder(text: str) -> tuple[str, str]:
    name, found, folder = text.partition("=")
    if not found or not Path(folder).is_dir():
        raise ShardCoreError(f"--with {text} names no folder; it needs NAME=FOLDER")
    return name, folder


if __name__ == "__main__":
    sys.exit(main())
