"""Each field of each format is damaged as its declaration tells, and refused in one line; nothing else is raised.

SHARDCORE_EXAMPLES=1200 python -m pytest -n 0 tests/test_declared_fuzz.py     so many damages of each format
"""

import json
import os
import random
import tempfile
from pathlib import Path

import fuzz_declared
import fuzz_files
import pytest
from fuzz_formats import FORMATS
from test_fuzz import copied, refusal

EXAMPLES = int(os.environ.get("SHARDCORE_EXAMPLES", "6"))
"""Damages of each format."""
NAMES = [name for name in fuzz_declared.FILES if name in FORMATS]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    fuzz_files.make(folder)
    return fuzz_files.Sound.read(folder)


@pytest.fixture(scope="module")
def all_cases(sound, tmp_path_factory):
    """All damages of each format, in an order that a seed draws."""
    found = {}
    for name in NAMES:
        folder = copied(FORMATS[name], sound, tmp_path_factory.mktemp(name) / "whole")
        whole = fuzz_declared.value_of(fuzz_declared.file_of(name, folder))
        records = fuzz_declared.records_of(name, folder, sound)
        found[name] = sorted(fuzz_declared.cases(records, whole), key=lambda case: str(case[:3]))
        random.Random(0).shuffle(found[name])
    return found


@pytest.mark.timeout(600 + EXAMPLES)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_declaration_forbids_is_refused_and_all_else_can_be_used(sound, all_cases, name):
    nonsense, refused = [], 0
    some = all_cases[name][:EXAMPLES]
    for case in some:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
            folder = copied(FORMATS[name], sound, Path(place, "case"))
            fuzz_declared.damage(fuzz_declared.file_of(name, folder), case)
            message = refusal(name, sound, folder)
        refused += bool(message)
        if case.is_wrong and not message:
            nonsense.append(case)
    if where := os.environ.get("SHARDCORE_FUZZ_OUT"):
        with open(where, "a") as file:
            of = {"format": name, "damages": len(some), "of": len(all_cases[name]), "refused": refused}
            file.write(json.dumps(of | {"nonsense": len(nonsense)}) + "\n")
    assert not nonsense, nonsense[:3]


def test_each_format_has_fields_to_damage(all_cases):
    assert {name: len(found) for name, found in all_cases.items() if len(found) < 50} == {}
