"""Commands that errors print, run in an environment with the wheel alone."""

import os
import re
import subprocess
import sys

import pytest
from laws import comm_samples, compute_samples, linear_law, pool
from test_wheel import ROOT, wheel  # noqa: F401 (a fixture)

from shardcore.io import dataset

PROBLEM = ROOT / "problems/mlperf-dlrm-dcnv2-8.json"
PLAN = f"shardcore plan {PROBLEM} --hardware nvidia-h100-sxm --budget-evals 4 --out plan.json"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "command, lacking",
    [
        (f"{PLAN} --algorithm torchrec", "fbgemm_gpu"),
        ("shardcore train samples --out model", "pyarrow"),
        ("shardcore history memory://plans name", "fsspec"),
        (
            "python -c 'from shardcore.core.extras import explain_missing_extras\n"
            "with explain_missing_extras(): import matplotlib.figure'",
            "matplotlib",
        ),
    ],
)
def test_what_an_error_says_to_install_is_all_that_lacks(wheel, tmp_path, command, lacking):  # noqa: F811
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    samples, binaries = tmp_path / "samples", tmp_path / "env/bin"
    dataset.write_compute_samples(
        samples, compute_samples(linear_law, 60), dataset.write_pool(samples, pool())
    )
    dataset.write_collective_samples(samples, comm_samples(20))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PATH": f"{binaries}:{env['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(line):
        options = {"cwd": tmp_path, "env": env, "text": True, "capture_output": True}
        return subprocess.run(["sh", "-c", line], check=False, **options)

    installed = run(f"pip install --quiet {wheel}")
    if "Temporary failure in name resolution" in installed.stderr:
        pytest.skip("there is no package index")
    assert installed.returncode == 0, installed.stderr
    before = run(command)
    error = before.stderr.strip().splitlines()[-1]
    assert before.returncode == 1 and f"No module named '{lacking}'" in error
    recipe = re.search(r"\): (pip install .*)$", error)[1]
    installed = run(recipe)
    assert installed.returncode == 0, installed.stderr
    after = run(command)
    if "history" in command:  # that store is empty
        assert "no plan is published for problem 'name'" in after.stderr
    else:
        assert after.returncode == 0, after.stderr
