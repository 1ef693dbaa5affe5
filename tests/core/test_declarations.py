"""Declarations in annotations: every mark is one that somebody reads, and a record keeps its rules."""

import dataclasses
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Annotated, get_type_hints

import pytest

import shardcore
from shardcore.cli.options import (
    POSITIONAL,
    Flat,
    Needs,
    Output,
    Parser,
    build_config,
    field_declarations,
    option_declarations,
)
from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import (
    Record,
    Rule,
    annotation_metadata,
    entry_count_within,
    number_within,
    one_of,
)


def records():
    """All dataclasses of the library."""
    for found in pkgutil.walk_packages(shardcore.__path__, "shardcore."):
        if found.name.endswith("__main__") or ".testing" in found.name:
            continue
        module = importlib.import_module(found.name)
        for cls in vars(module).values():
            if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == found.name:
                yield cls


def test_no_mark_of_an_annotation_is_one_that_nobody_reads():
    n_rules = 0
    for cls in records():
        try:
            hints = get_type_hints(cls, include_extras=True)
        except NameError:  # imported for type checkers only
            continue
        for name, hint in hints.items():
            unread = [
                x
                for x in annotation_metadata(hint)
                if not isinstance(x, Rule | Flat | Output | Parser | Needs | str) and x is not POSITIONAL
            ]
            assert not unread, (cls, name)
            n_rules += sum(isinstance(x, Rule) for x in annotation_metadata(hint))
    assert n_rules > 150


@dataclass(frozen=True)
class Limited(Record):
    share: Annotated[float | None, number_within(0, 1, above=True, below=True, such_as="0.5")] = None
    count: Annotated[int, number_within(1, 9)] | None = 3
    kind: Annotated[str, one_of(("a", "b"))] = "a"
    names: Annotated[tuple[str, ...], entry_count_within(1, 2)] = ("x",)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"share": 0}, "limited has share 0.0; it needs more than 0 to less than 1, such as 0.5"),
        ({"share": float("nan")}, "limited has share nan; it needs"),
        ({"count": 10}, "limited has count 10; it needs 1 to 9"),
        ({"kind": "c"}, "limited has kind 'c'; known are a, b"),
        ({"names": ()}, "limited has no names; it needs 1 to 2"),
        ({"names": ("x", "y", "z")}, "limited has 3 names; it needs 1 to 2"),
        ({"count": "x"}, "limited: count is 'x'; it needs to be a whole number or None"),
        (
            {"count": 0, "kind": "c"},
            "limited has count 0; it needs 1 to 9; limited has kind 'c'; known are a, b",
        ),
    ],
)
def test_a_record_keeps_its_rules(given, message):
    with pytest.raises(ShardCoreError) as error:
        Limited(**given)
    assert str(error.value).startswith(message)
    assert Limited(share=0.5, count=None).count is None


@dataclass(frozen=True)
class Options:
    limited: Annotated[Limited, Flat(("count", "kind"))] = Limited(count=7)
    out: str = ""


def test_fields_of_a_config_are_options_with_its_rules_and_the_defaults_of_the_instance():
    keys = option_declarations(Options)
    assert list(keys) == ["count", "kind", "out"] and keys["count"].default == 7
    assert keys["count"].rules == field_declarations(Limited)["count"].rules and keys["count"].rules[
        0
    ].ends == (
        1,
        9,
    )
    assert build_config(Options, {"count": 2, "kind": "b", "out": "x"}) == Options(
        Limited(count=2, kind="b"), "x"
    )
