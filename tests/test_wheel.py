"""The wheel builds, holds the library only, and plans with the core of packages."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law
from packaging.requirements import Requirement

from shardcore import Problem, Table, Topology, __version__
from shardcore.cost import fit, neural
from shardcore.io import files

ROOT = Path(__file__).parent.parent
PIP = (sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check")
CORE = {"numpy", "numba", "llvmlite", "scipy", "safetensors"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, as building leaves files beside the code
    for package in ("shardcore", "tasks", "flows"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    asks_no_index = ("--no-deps", "--no-build-isolation")
    subprocess.run([*PIP, "wheel", *asks_no_index, "-w", folder, source], check=True, capture_output=True)
    [made] = folder.glob("shardcore-*.whl")
    return made


def required(lines, found):
    """Distributions that are required without extras, and those that they require, as installed here."""
    for requirement in map(Requirement, lines or ()):
        name = requirement.name
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[name] = metadata.distribution(name)
            required(found[name].requires, found)
    return found


@pytest.mark.long
def test_the_wheel_holds_the_library_with_its_types_and_data(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    kept = {str(path.relative_to(ROOT)) for path in (ROOT / "shardcore").rglob("*") if path.is_file()}
    kept = {name for name in kept if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == kept
    kept_data = ("py.typed", "tables/public_tables.json", "cost/profiles/nvidia-h100-sxm.json")
    assert {f"shardcore/{name}" for name in kept_data} <= kept


@pytest.mark.long
def test_with_the_core_only_it_plans_prices_and_compares_and_names_missing_extras(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    binaries = tmp_path / "env/bin"
    [site] = (tmp_path / "env/lib").glob("python*/site-packages")
    # Whatever of it PYTHONPATH shows is not installed there.
    install = ("install", "--no-deps", "--ignore-installed", wheel)
    subprocess.run([*PIP, "--python", binaries / "python", *install], check=True)
    [made] = metadata.distributions(path=[str(site)])
    assert made.version == __version__
    core = required(made.requires, {})
    assert set(core) == CORE
    for distribution in core.values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            (site / top).exists() or (site / top).symlink_to(distribution.locate_file(top))
    trained = fit.train(compute_samples(linear_law, 60), comm_samples(20), SETTING, fit.FitConfig(epochs=2))
    neural.save(trained.model, tmp_path / "model")
    tables = tuple(Table(f"t{i}", 1000 + i, 16, 5.0) for i in range(24))
    topology = Topology.of_hosts(1, 4, memory_gib=1)
    files.write_problem(tmp_path / "problem.json", Problem("small", tables, topology, SETTING.batch))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*arguments):
        options = {"cwd": tmp_path, "env": env, "text": True, "capture_output": True, "timeout": 1200}
        return subprocess.run(arguments, check=False, **options)

    for options, out in ((["--budget-evals", "2000"], "a.json"), (["--algorithm", "random"], "b.json")):
        done = run(binaries / "shardcore", "plan", "problem.json", "--model", "model", *options, "--out", out)
        assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "a.json").read_text())["placements"]) >= 24  # a shard each, at least
    # The first minute of a GPU's user.
    for command in (
        "problem mlperf-dlrm-dcnv2 --devices 8 --batch 65536 --out gpu.json",
        "plan gpu.json --hardware nvidia-h100-sxm --budget-evals 500 --out gpu-plan.json",
    ):
        done = run(binaries / "shardcore", *command.split())
        assert done.returncode == 0, done.stderr
    assert "profile: published measurements, not of your machine" in done.stdout
    for command in (
        ["-h"],
        ["price", "a.json", "--problem", "problem.json", "--model", "model"],
        ["diff", "a.json", "b.json", "--problem", "problem.json"],
    ):
        done = run(binaries / "python", "-m", "shardcore", *command)
        assert done.returncode == 0 and done.stdout, done.stderr
    done = run(binaries / "shardcore", "train", ROOT / "datasets/cpu-amd-epyc", "--out", "trained")
    assert done.returncode == 1
    assert (
        done.stderr == "error: this needs pyarrow, which is not installed (No module named 'pyarrow'): "
        "pip install 'shardcore[measure]'\n"
    )
    named = "import shardcore; shardcore.replay"
    assert "pip install 'shardcore[measure]'" in run(binaries / "python", "-c", named).stderr
