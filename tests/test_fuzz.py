"""A slice of bench/fuzz.py: damaged files of every format are refused in a line, or can be used."""

import pytest

from bench import fuzz, fuzz_files
from bench.fuzz_formats import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer")
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
