"""What numba compiles is kept in a folder of the sources' version, and can be given to a copy of the
package."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shardcore.core import jit

PACKAGE = Path(jit.__file__).parents[1]
LISTENED = """
import shardcore
from shardcore.core.progress import report_to_listener
from tests.warm_up import warm_up
with report_to_listener(lambda phase, best_ms, left_s: print(phase)):
    warm_up()
print(shardcore.__file__)
"""
SEARCHED = """
from shardcore.cost.analytic import AnalyticModel
from shardcore.search import SHARDERS, Budget
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
problem = Problem("p", (Table("a", 1000, 16, 2.0),), Topology((Device(2**30), Device(2**30))), 64)
SHARDERS["anneal_columns"](problem, AnalyticModel(Setting("made-up", 64)), budget=Budget(evals=5_000))
from shardcore.core import jit
print(*sorted(path.name.partition("-")[0] for path in jit.cache_folder().glob("*/*.nbi")))
"""
COMPUTED = """
from numba import float64
from numba.core import codegen
{hook}
from shardcore.core import jit

@jit.compile_inner
def squared(x):
    return x * x

@jit.compile_inner
def halved(x):
    return squared(x) / (2 * x)

@jit.compile_entry(float64(float64))
def computed(x):
    return squared(x) + halved(x)

print(computed(3.0), "linked" if jit._MAY_LINK else "compiled")
"""


@pytest.fixture
def copy(tmp_path):
    """Of the package, without what is compiled."""
    return Path(
        shutil.copytree(PACKAGE, tmp_path / "shardcore", ignore=shutil.ignore_patterns("__pycache__"))
    )


def test_the_folder_is_another_for_every_edit_of_a_compiled_source_and_for_no_other(copy, monkeypatch):
    monkeypatch.setattr(jit, "_PACKAGE", copy)
    first = jit.cache_folder()
    (copy / "core/types.py").write_text("")
    assert jit.cache_folder() == first and first.parent == copy / "__pycache__"
    found = {first}
    for name in ("core/jit.py", "cost/compiled.py", "step/engine/state.py"):
        with open(copy / name, "a") as source:
            source.write("# an edit\n")
        found.add(jit.cache_folder())
    assert len(found) == 4


def test_the_folders_used_last_are_kept(copy, monkeypatch):
    monkeypatch.setattr(jit, "_PACKAGE", copy)
    kept = []
    for edit in range(jit._KEPT):
        (copy / "core/jit.py").write_text(f"# {edit}")
        kept.append(jit.cache_folder())
        os.utime(kept[-1], (edit, edit))
    (copy / "core/jit.py").write_text("# 0")
    assert jit.cache_folder() == kept[0]  # which was made first
    (copy / "core/jit.py").write_text("# another")
    assert jit.cache_folder().exists() and [folder.exists() for folder in kept] == [True, False, True]


def test_the_folder_of_now_is_kept_though_others_have_later_times(copy, monkeypatch):
    monkeypatch.setattr(jit, "_PACKAGE", copy)
    for edit in range(jit._KEPT):
        (copy / "core/jit.py").write_text(f"# {edit}")
        os.utime(jit.cache_folder(), (2**32, 2**32))  # by a clock that was ahead
    (copy / "core/jit.py").write_text("# of now")
    assert jit.cache_folder().exists()


@pytest.fixture
def unwritable(copy, tmp_path, monkeypatch):
    """A package, a home and a folder for temporary files, all below tmp_path. The package cannot be written."""
    monkeypatch.setattr(jit, "_PACKAGE", copy)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (copy / "__pycache__").write_text("a file is in the way")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    yield copy
    assert not list((tmp_path / "current").iterdir())


def test_where_the_package_cannot_be_written_the_user_s_cache_has_it(unwritable, tmp_path):
    assert jit.cache_folder().parent == tmp_path / "home/.cache/shardcore"


@pytest.mark.parametrize("home", ["/dev/null", ".", ""])
def test_without_a_home_compiled_code_is_in_a_private_temporary_folder(
    unwritable, tmp_path, monkeypatch, home
):
    monkeypatch.setenv("HOME", home)
    if not home:  # root may write in /.cache
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    folder = jit.cache_folder()
    assert folder.is_relative_to(tmp_path / "tmp") and folder.stat().st_mode & 0o777 == 0o700
    assert jit.cache_folder() == folder  # which the next process finds


def link(place, tmp_path):
    (tmp_path / "others").mkdir()
    place.symlink_to(tmp_path / "others")


def open_to_all(place, tmp_path):
    place.mkdir(parents=True)
    place.chmod(0o777)


def another_user_s(place, tmp_path):
    place.mkdir(parents=True)
    os.chown(place, 12345, 12345)


@pytest.mark.parametrize(
    "harm",
    [
        link,
        open_to_all,
        pytest.param(
            another_user_s, marks=pytest.mark.skipif(os.geteuid() != 0, reason="root gives files away")
        ),
    ],
)
@pytest.mark.parametrize("whose", ["the parent", "the folder"])
def test_folders_that_others_may_change_are_not_used(unwritable, tmp_path, monkeypatch, harm, whose):
    def spoilt(parent):
        place = parent if whose == "the parent" else parent / jit.cache_folder().name
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        harm(place, Path(tempfile.mkdtemp(dir=tmp_path)))
        return parent

    cache = spoilt(tmp_path / "home/.cache/shardcore")
    temporary = jit.cache_folder().parent
    assert temporary.parent == tmp_path / "tmp" and temporary != cache
    spoilt(temporary)
    last = jit.cache_folder()
    assert (
        last.parent == tmp_path / "tmp" and last.stat().st_mode & 0o777 == 0o700 and not list(last.iterdir())
    )
    assert jit.cache_folder() != last  # nobody can guess its name


def run(code: str, package: Path) -> list[str]:
    """Lines that code prints with this copy of the package."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": f"{package.parent}:{PACKAGE.parent}"},
        text=True,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    ).stdout.splitlines()


def test_a_copy_that_is_given_what_is_compiled_compiles_nothing(copy):
    jit.copy_compiled_code(PACKAGE, copy)
    assert run(LISTENED, copy) == [str(copy / "__init__.py")]


@pytest.mark.long
def test_a_search_compiles_only_what_it_runs(copy):
    [names] = run(SEARCHED, copy)
    # Neither heads of other models nor the bound's loops.
    assert set(names.split()) == {
        "compiled.linear_op_ms",
        "greedy.place_greedily",
        "run.anneal",
        *(f"state.{name}" for name in ("place_shards", "share_items")),
    }


@pytest.mark.parametrize(
    "hook, inner",
    [
        ("", "linked"),
        # The method is another class's.
        (
            "codegen.JITCodeLibrary._finalize_final_module = codegen.CPUCodeLibrary._finalize_final_module\n"
            "del codegen.CPUCodeLibrary._finalize_final_module",
            "compiled",
        ),
        ("del codegen.CPUCodeLibrary", "compiled"),
    ],
    ids=["numba of today", "no method", "no class"],
)
def test_where_numba_lacks_the_method_inner_functions_compile_as_usual(copy, hook, inner):
    (copy.parent / "computed.py").write_text(COMPUTED.format(hook=hook))  # a file, as compiled code is kept
    assert run("import computed", copy) == [f"10.5 {inner}"]
