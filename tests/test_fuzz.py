"""A slice of bench/fuzz.py: damaged files of every format are refused in a line, or can be used."""

import os
import shutil

import pytest

from bench import fuzz, fuzz_files
from bench.fuzz_formats import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer")
NOT_READ = {"report.html", "cost.json", ".turn"}
"""By who loads a plan."""
OF_EACH = 12
"""Cases, which makes 276 of all formats."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    fuzz_files.make(folder)
    return fuzz_files.Sound.read(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_damaged_is_refused_in_a_line_or_can_be_used(sound, tmp_path, name):
    (tmp_path / "whole").mkdir()
    assert fuzz.judge(name, 0, sound, tmp_path / "whole", damage=False)["outcome"] == "accepted"
    rows = list(fuzz.judged(name, range(OF_EACH), sound))
    assert [r for r in rows if r["outcome"] not in ("refused", "accepted")] == []
    assert sum(r["outcome"] == "refused" for r in rows) > OF_EACH / 3  # or it damages nothing


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"users", "cache"}))  # DVC's own: left alone
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(sound, tmp_path, name):
    """To open one, or to read it, waits for a writer that never comes."""
    one = FORMATS[name]
    for part in one.parts:
        whole = sound.folder / part
        read = [p for p in (whole, *whole.rglob("*")) if p.is_file() and p.name not in NOT_READ]
        for i, file in enumerate(read):
            folder = tmp_path / f"{part}-{i}"
            folder.mkdir()
            for other in one.parts:
                (shutil.copytree if (sound.folder / other).is_dir() else shutil.copy)(
                    sound.folder / other, folder / other
                )
            path = folder / file.relative_to(sound.folder)
            path.unlink()
            os.mkfifo(path)
            row = fuzz.used(one, sound, folder)
            assert (row["outcome"], "no file" in row["said"]) == ("refused", True), (file, row)
