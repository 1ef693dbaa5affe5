"""Kinds of sharding, and pipelines, are rows. Code reads their attributes: each place that names a row is counted."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from shardcore.core.job import PIPELINES
from shardcore.core.links import ROWS_OVER
from shardcore.step import kinds
from shardcore.step.kinds import SHARDING_KINDS, ShardingKind

ROOT = Path(__file__).parents[2]
MOST_PLACES = 10

EXPLAINED = {
    ("shardcore/measure/sampling/steps.py", "WHOLE_ROWS"): (
        2,
        "a drawn plan is named by its kinds, and on one device this one stands in for those of several",
    ),
    ("shardcore/torchrec/baseline.py", "column_wise"): (1, "an argument of a function of TorchRec"),
    ("shardcore/torchrec/planner.py", "prefetch"): (
        1,
        "of several pipelines that fetch ahead, the default one",
    ),
    ("shardcore/io/dataset.py", "pod"): (
        1,
        "fields of a request, which kept their names in digests of old files",
    ),
    ("shardcore/testing/plans.py", "column"): (1, "counts cells without step/kinds, to check that"),
    ("shardcore/testing/plans.py", "data_parallel"): (2, "as above"),
}
"""How often a file names a row, and why."""

OTHER_MEANINGS = {
    "row": {
        "shardcore/core/catalog.py",
        "shardcore/cost/profile_law.py",
        "shardcore/plans/diff.py",
        "shardcore/plans/move_price.py",
        "shardcore/step/memory.py",
        "shardcore/step/sharding_groups.py",
        "shardcore/tables/host_rows.py",
        "shardcore/torchrec/moves/rows.py",
        "shardcore/torchrec/moves/transfer.py",
    },  # an optimizer keeps state by row, or by cell
    "pod": {"shardcore/core/links.py", "shardcore/step/scopes.py"},  # the rows of links and of scopes
    "none": None,  # a default in many files
    "fused": None,  # a compute kernel of TorchRec
    "host": None,  # a machine
}
"""Words that mean something else: by word, in which files. None: in all."""
HOMES = {"shardcore/step/kinds.py", "shardcore/core/job.py"}
"""The modules that have the rows. Names there do not count."""


def names_of_rows(source: str) -> Iterator[str]:
    """Names of single rows in Python source, as strings or as names of step.kinds."""
    in_files = {*SHARDING_KINDS, *PIPELINES, *ROWS_OVER} | {
        name for x in SHARDING_KINDS.values() for name in x.torchrec
    }
    in_code = {name for name, value in vars(kinds).items() if isinstance(value, ShardingKind)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in in_files:
            yield node.value
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in in_code:
                yield name


def places_that_name_rows() -> Counter[tuple[str, str]]:
    """How often each file names each row, other meanings left out."""
    places: Counter[tuple[str, str]] = Counter()
    for room in ("shardcore", "flows", "tasks"):
        for path in sorted((ROOT / room).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for name in names_of_rows(path.read_text()) if file not in HOMES else ():
                files = OTHER_MEANINGS.get(name, set())
                places[file, name] += files is not None and file not in files
    return +places


def test_few_places_name_a_row_and_each_is_explained():
    places = places_that_name_rows()
    assert places == {place: times for place, (times, _) in EXPLAINED.items()}
    assert places.total() <= MOST_PLACES


def test_words_of_other_meanings_stand_where_the_table_says():
    for word, files in OTHER_MEANINGS.items():
        for file in files or ():
            assert word in names_of_rows((ROOT / file).read_text()), f"{file} has no {word!r} any more"


def test_names_are_found_as_strings_and_as_constants():
    source = (
        "Placement('host_row', x)\nkinds.WHOLE_ROWS\nif k is WHOLE_ROWS: 'sparse_dist'\n'''row'''\nrow = 1"
    )
    assert Counter(names_of_rows(source)) == {"host_row": 1, "WHOLE_ROWS": 2, "sparse_dist": 1, "row": 1}
