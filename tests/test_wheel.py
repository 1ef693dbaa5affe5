"""The wheel builds, installs, and works without the repository."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_builds_installs_and_carries_its_data(tmp_path):
    source = tmp_path / "source"  # a copy, as building leaves files beside the code
    for package in ("shardcore", "tasks", "flows"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    # asks no index
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w",
                    tmp_path / "wheel", source],
                   check=True, capture_output=True)
    [wheel] = (tmp_path / "wheel").glob("shardcore-*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    code = ("import sys, shardcore; from shardcore.tables import public; "
            "assert 'site' in shardcore.__file__; "
            "assert not {'prefect', 'ray', 'mlflow', 'dvc', 'fbgemm_gpu', 'yaml'} & set(sys.modules); "
            "print(len(public.public_pool('mlperf-dlrm-dcnv2')), sorted(shardcore.SHARDERS)[0])")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path,
                          env={"PYTHONPATH": str(tmp_path / "site")}, check=True,
                          capture_output=True, text=True)
    assert done.stdout.split() == ["26", "anneal"]
