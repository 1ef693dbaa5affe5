"""The acceptance run of a GPU, rehearsed: its paths with a stand-in for CUDA, not its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardcore.io import dataset

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_each_question_has_a_verdict_and_the_data_stay(tmp_path):
    env = {
        **os.environ,
        "SHARDCORE_REHEARSAL": "fake_cuda:FakeCuda",
        "FAKE_CUDA": str(tmp_path),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'measure'}",
    }
    out = tmp_path / "out"
    done = subprocess.run(
        [
            sys.executable,
            *(
                f"-m bench.gpu_acceptance --out {out} --minutes 4 --batch 64 --groups 20 --again 8 "
                "--arena-gib 0.0625 --exchanges 12 --only card events uvm groups adagrad repeats exchanges memory "
                "widths profile -- --tolerance "
                # As many samples, whatever the load: the time is for machines that are never so slow.
                "0.5 --max-repeats 6 --max-shards 6 --interleave 4 --samples 24"
            ).split(),
        ],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=580,
    )
    verdicts = json.loads((out / "verdicts.json").read_text())
    asked = "card events uvm groups adagrad repeats exchanges memory widths profile".split()
    assert list(verdicts) == asked, done.stdout
    assert not any("error" in v for v in verdicts.values()), done.stdout
    assert verdicts["card"]["good"] and verdicts["card"]["name"] == "nvidia-h100-80gb-hbm3-rehearsal"
    assert verdicts["events"]["groups"] > 20 and verdicts["groups"]["groups"] >= 20
    assert verdicts["memory"] == {"good": True, "peak": 0.5} and verdicts["repeats"]["groups"] >= 8
    assert sum(verdicts["widths"][kind] for kind in ("narrow", "wide", "mixed")) > 10
    assert verdicts["adagrad"]["groups"] >= 5 and verdicts["exchanges"] == {
        "good": True,
        "exchanges": 12,
        "failed": 0.0,
    }
    # Each kind of op and collective is held against the profile of the card.
    assert verdicts["card"]["profile"] == verdicts["profile"]["profile"] == "nvidia-h100-sxm"
    assert {"fp16 rowwise_adagrad backward, narrow groups", "all-gather of 2 on 1 hosts"} < set(
        verdicts["profile"]
    )
    assert "profile nvidia-h100-sxm expects" in done.stdout and "times the prediction" in done.stdout
    assert done.returncode == (not all(v["good"] for v in verdicts.values()))
    assert len(dataset.read_compute_samples(out / "data")) >= 20
