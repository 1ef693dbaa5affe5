"""With a budget in evaluations, a seed gives one plan: under any BLAS kernel, set of vector instructions, number of
threads, order of sets, and number of rows that are computed at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from laws import SETTING, cache_law, comm_samples, compute_samples

from shardcore.cost import fit, neural

SCRIPT = Path(__file__).parent / "plans_of_seeds.py"
WITHOUT_AVX512 = "X86_V4 AVX512_ICL AVX512_SPR"
ELSEWHERE = {
    "Haswell": ({"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "512"}, ""),
    "SkylakeX": ({"OPENBLAS_CORETYPE": "SkylakeX", "OMP_NUM_THREADS": "2"}, ""),
    "Zen": ({"OPENBLAS_CORETYPE": "Zen", "NPY_DISABLE_CPU_FEATURES": WITHOUT_AVX512}, ""),
    "row by row": ({"OPENBLAS_CORETYPE": "Haswell", "PYTHONHASHSEED": "1"}, "1"),
    "old": (
        {
            "OPENBLAS_CORETYPE": "Prescott",
            "NPY_DISABLE_CPU_FEATURES": f"X86_V3 {WITHOUT_AVX512}",
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA",
        },
        "",
    ),
}


def plans(folder: Path, env: dict[str, str], rows: str) -> dict[str, str]:
    command = [sys.executable, SCRIPT, folder, *([rows] if rows else [])]
    run = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_seed_gives_one_plan_on_all_processors(tmp_path):
    comm = [*comm_samples(), *comm_samples(collective="all_to_all_ids")]
    model = fit.train(compute_samples(cache_law), comm, SETTING, fit.FitConfig(epochs=10)).model
    neural.save(model, tmp_path)
    here = plans(tmp_path, {}, "")
    assert len(here) > 100
    for name, (env, rows) in ELSEWHERE.items():
        if name == "SkylakeX" and "avx512f" not in Path("/proc/cpuinfo").read_text():
            continue  # its instructions are illegal here
        there = plans(tmp_path, env, rows)
        assert [key for key in here if there[key] != here[key]] == [], name
