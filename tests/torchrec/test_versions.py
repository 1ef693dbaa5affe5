"""TorchRec 1.5 to the newest that the registry has, beside the torch and FBGEMM that are installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

HERE = Path(__file__).parent
NEWEST = "newest"
VERSIONS = ("1.5.0", "1.5.1", "1.6.1", "1.7.0", "1.8.0", "1.9.0", "1.9.1", "1.9.2", NEWEST)


def install_torchrec(version: str, folder: Path) -> str:
    """The version of TorchRec that pip installed in a folder, alone. Skips without a registry."""
    wanted = "torchrec" if version == NEWEST else f"torchrec=={version}"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, wanted],
        capture_output=True,
        text=True,
    )
    if "from versions: none" in done.stderr:
        pytest.skip(f"pip reaches no registry that has TorchRec {version}")
    assert done.returncode == 0, done.stderr
    [metadata] = folder.glob("torchrec-*.dist-info")
    return metadata.name.removeprefix("torchrec-").removesuffix(".dist-info")


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_plans_exports_and_trains(tmp_path, version):
    installed = install_torchrec(version, tmp_path)
    assert version in (installed, NEWEST)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE.parents[1])])}
    imports = subprocess.run(
        [sys.executable, "-c", "import torchrec, torchrec.distributed.planner"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert imports.returncode == 0, (
        f"TorchRec {installed} does not import beside the installed torch:\n{imports.stderr}"
    )
    checks = subprocess.run(
        [sys.executable, HERE / "version_checks.py", installed],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert checks.returncode == 0, f"TorchRec {installed}:\n{checks.stderr[-4000:]}"


@pytest.mark.long
def test_variable_batches_run_under_grid_shard_since_1_9(tmp_path):
    """Each collective of a step carries the bytes expected."""
    install_torchrec("1.9.0", tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE.parents[1])])}
    checks = subprocess.run(
        [sys.executable, HERE / "variable_batch_checks.py", "6"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert checks.returncode == 0, checks.stderr[-4000:]
