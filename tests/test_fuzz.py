"""Damaged files of every format are refused in one line that names the file, or can be used.

    SHARDCORE_EXAMPLES=1700 python -m pytest -n 0 tests/test_fuzz.py      so many random cases of each format

Each case damages a sound file, reads it as users' commands do, and uses what was read. Hypothesis draws the
cases, and shrinks one that fails.
"""

import os
import shutil
import tempfile
from pathlib import Path

import fuzz_files
import pytest
from fuzz_formats import FORMATS, Format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcore.core.errors import MOST_CHARACTERS, ShardCoreError

pytestmark = [pytest.mark.filterwarnings("ignore:Pydantic serializer"), pytest.mark.timeout(120)]
NOT_READ = {"report.html", "cost.json", ".turn"}
"""Files of a store that loading a plan does not read."""
NAME_NO_FILE = {"batch", "hot_ids", "move-rates", "request", "users"}
"""Formats of which some refusals name the table, the part of a request, or the links whose rate a move needs."""
EXAMPLES = os.environ.get("SHARDCORE_EXAMPLES")
"""Random cases of each format. If none are given, some, and more in the long tests."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    fuzz_files.make(folder)
    return fuzz_files.Sound.read(folder)


def copied(one: Format, sound: fuzz_files.Sound, folder: Path) -> Path:
    folder.mkdir()
    for part in one.parts:
        copy = shutil.copytree if (sound.folder / part).is_dir() else shutil.copy
        copy(sound.folder / part, folder / part)
    return folder


def refusal(name: str, sound: fuzz_files.Sound, folder: Path) -> str:
    """Message of the refusal, empty where the files can be used. Whatever else is raised fails the test."""
    there = {path.name for path in folder.rglob("*")}
    try:
        FORMATS[name].use(folder, sound)
    except ShardCoreError as error:
        # A line for each of the first faults, and one for the number of the others.
        lines = str(error).split("\n")
        assert len(lines) <= 6 and all(x.isprintable() and 0 < len(x) <= MOST_CHARACTERS for x in lines)
        there |= {path.name for path in folder.rglob("*")}  # a use may move files
        assert name in NAME_NO_FILE or any(file in str(error) for file in there), error
        return str(error)
    return ""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("examples", [int(EXAMPLES or 4), pytest.param(12, marks=pytest.mark.long)])
def test_what_is_damaged_is_refused_in_a_few_lines_or_can_be_used(sound, tmp_path, name, examples):
    one, refused = FORMATS[name], []
    assert refusal(name, sound, copied(one, sound, tmp_path / "whole")) == ""

    @settings(
        max_examples=examples,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def judge(data):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
            folder = copied(one, sound, Path(place, "case"))
            one.damage(folder, data.draw)
            refused.append(bool(refusal(name, sound, folder)))

    judge()
    assert sum(refused) > len(refused) / 3  # or it damages nothing


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"users", "cache"}))  # DVC's own: left alone
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(sound, tmp_path, name):
    """Opening or reading a pipe waits for a writer that never comes."""
    one = FORMATS[name]
    for part in one.parts:
        whole = sound.folder / part
        read = [p for p in (whole, *whole.rglob("*")) if p.is_file() and p.name not in NOT_READ]
        for i, file in enumerate(read):
            path = copied(one, sound, tmp_path / f"{part}-{i}") / file.relative_to(sound.folder)
            path.unlink()
            os.mkfifo(path)
            assert "no file" in refusal(name, sound, tmp_path / f"{part}-{i}"), file
