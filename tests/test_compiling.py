"""What numba compiles is kept in a folder of the sources' version, and can be given to a copy of the
package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardcore import compiling

PACKAGE = Path(compiling.__file__).parent
COMPILED = """
from shardcore.cost import compiled
from shardcore.search.anneal import compiled as annealing
for f in {**vars(annealing), **vars(compiled)}.values():
    if getattr(f, "nopython_signatures", None) and f.stats.cache_path:
        print(f.stats.cache_path, sum(f.stats.cache_misses.values()))
"""


@pytest.fixture
def copy(tmp_path):
    """Of the package, without what is compiled."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "shardcore",
                                ignore=shutil.ignore_patterns("__pycache__")))


def test_the_folder_is_another_for_every_edit_of_a_compiled_source_and_for_no_other(copy, monkeypatch):
    monkeypatch.setattr(compiling, "_PACKAGE", copy)
    first = compiling.cache_folder()
    (copy / "types.py").write_text("")
    assert compiling.cache_folder() == first and first.parent == copy / "__pycache__"
    found = {first}
    for name in ("compiling.py", "cost/compiled.py", "search/anneal/compiled/state.py"):
        with open(copy / name, "a") as source:
            source.write("# an edit\n")
        found.add(compiling.cache_folder())
    assert len(found) == 4


def test_what_is_compiled_already_is_known(copy, monkeypatch):
    assert compiling.compiled()  # the suite compiles before its tests
    monkeypatch.setattr(compiling, "_PACKAGE", copy)
    assert not compiling.compiled()


def test_the_folders_used_last_are_kept(copy, monkeypatch):
    monkeypatch.setattr(compiling, "_PACKAGE", copy)
    kept = []
    for edit in range(compiling._KEPT):
        (copy / "compiling.py").write_text(f"# {edit}")
        kept.append(compiling.cache_folder())
        os.utime(kept[-1], (edit, edit))
    (copy / "compiling.py").write_text("# 0")
    assert compiling.cache_folder() == kept[0]  # which was made first
    (copy / "compiling.py").write_text("# another")
    assert compiling.cache_folder().exists() and [folder.exists() for folder in kept] == [True, False, True]


def test_where_the_package_cannot_be_written_the_user_s_cache_has_it(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_PACKAGE", copy)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (copy / "__pycache__").write_text("a file is in the way")
    assert compiling.cache_folder().parent == tmp_path / ".cache/shardcore"


def test_a_copy_that_is_given_what_is_compiled_compiles_nothing(copy):
    compiling.copy_compiled(PACKAGE, copy)
    said = subprocess.run([sys.executable, "-c", COMPILED], cwd=copy.parent,
                          env={**os.environ, "PYTHONPATH": str(copy.parent)},
                          text=True, stdout=subprocess.PIPE, check=True, timeout=300).stdout.split()
    paths, misses = said[::2], said[1::2]
    assert len(paths) >= 8 and all(Path(path).is_relative_to(copy) for path in paths) and set(misses) == {"0"}
