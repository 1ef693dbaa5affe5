"""The wheel builds, installs, and works without the repository."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PIP = ("-m", "pip", "-qq", "--disable-pip-version-check")


@pytest.fixture
def wheel(tmp_path):
    source = tmp_path / "source"  # a copy, as building leaves files beside the code
    for package in ("shardcore", "tasks", "flows"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # asks no index
    subprocess.run(
        [
            sys.executable,
            *PIP,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            tmp_path / "wheel",
            source,
        ],
        check=True,
        capture_output=True,
    )
    [made] = (tmp_path / "wheel").glob("shardcore-*.whl")
    return made


def required(lines, found):
    """The distributions that are required without extras, and those that they require, as installed here."""
    for line in lines or ():
        of = Requirement(line)
        if of.name not in found and (of.marker is None or of.marker.evaluate({"extra": ""})):
            found[of.name] = metadata.distribution(of.name)
            required(found[of.name].requires, found)
    return found


@pytest.mark.long
def test_with_the_base_only_the_wheel_trains_a_model_and_plans(wheel, tmp_path):
    """In an environment with what the wheel requires: no FBGEMM, no orchestrator, no repository."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    [site] = (tmp_path / "env/lib").glob("python*/site-packages")
    subprocess.run([sys.executable, *PIP, "install", "--no-deps", "--target", site, wheel], check=True)
    [made] = metadata.distributions(path=[str(site)])
    bases = required(made.requires, {})
    for base in bases.values():
        for top in {file.parts[0] for file in base.files} - {"..", "__pycache__"}:
            (site / top).exists() or (site / top).symlink_to(base.locate_file(top))
    assert "torch" in bases and not set(bases) & {"prefect", "ray", "mlflow", "dvc", "fbgemm-gpu-cpu", "rich"}
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*arguments):
        return subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=env,
            text=True,
            check=False,
            capture_output=True,
            timeout=1200,
        )

    done = run(
        "-c",
        "import sys; from shardcore.tables import public; from shardcore import SHARDERS; "
        "assert not {'fbgemm_gpu', 'yaml'} & set(sys.modules); "
        "print(len(public.public_pool('mlperf-dlrm-dcnv2')), sorted(SHARDERS)[0])",
    )
    assert done.stdout.split() == ["26", "anneal"], done.stderr
    for command in (
        ["train", ROOT / "datasets/cpu-amd-epyc", "--out", "model"],
        [
            "plan",
            ROOT / "problems/pool-7-00.json",
            "--model",
            "model",
            "--budget-evals",
            "2000",
            "--out",
            "plan.json",
        ],
    ):
        done = run("-m", "shardcore", *command)
        assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "plan.json").read_text())["placements"]) >= 37  # a table each, at least
    done = run("-m", "flows.refresh")
    assert done.returncode == 1 and "pip install 'shardcore[pipeline]'" in done.stderr
