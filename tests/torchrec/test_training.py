"""Real training: plans of all kinds as TorchRec trains them, and the example that users copy."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import training
import wrapped_training
from laws import trained
from shapes import column

from shardcore.core.types import Placement, Plan, Shard
from shardcore.cost import neural

EXAMPLE = Path(__file__).parents[2] / "examples/torchrec_dlrm/train.py"
DLRMV3 = Path(__file__).parents[2] / "examples/torchrec_dlrmv3/train.py"


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.long)])
def test_plans_train_as_the_whole_model_does(n):
    """Plans of all kinds, on four processes."""
    given = training.problem(2, 2, sequence=True)
    plans = {i: training.draw(given, np.random.default_rng([0, i])) for i in range(n)}
    kinds = {
        kind.split()[0] for plan in plans.values() for kind in training.kinds_of(plan, given, True).values()
    }
    assert kinds == {
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "grid_shard",
        "data_parallel",
    }
    assert training.train(given, plans, True) == dict.fromkeys(plans, "")


@pytest.mark.parametrize(
    "hosts, per_host, pods, seeds",
    [
        (4, 1, 2, range(1)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((4, 1, 2, range(3)), (4, 2, 2, range(6)))),
    ],
)
def test_plans_train_in_pods(hosts, per_host, pods, seeds):
    """Rows are divided over pods of two hosts, as TorchRec's runtime groups ranks."""
    given = training.problem(hosts, per_host, sequence=True, pods=pods)
    given = replace(given, topology=replace(given.topology, rows_over="pod"))
    plans = {i: training.draw(given, np.random.default_rng([1, i])) for i in seeds}
    assert any(p.kind == "pod_row" for plan in plans.values() for p in plan.placements)
    assert training.train(given, plans, True) == dict.fromkeys(plans, "")


@pytest.mark.long
def test_a_plan_that_does_not_train_is_said_to():
    given = training.problem(1, 2)
    a, *others = given.tables
    cut = [column(a, 0, 0, 4), Placement("row", Shard(a, 0, a.rows, 4, a.dim), (0, 1))]  # as no kind is
    found = training.train(given, {3: Plan((*cut, *(column(t, 0) for t in others)))})
    assert set(found) == {3} and "rank 0: ShardCoreError" in found[3] and "by row on devices 0, 1" in found[3]


def said_of(output: str, at_most: float) -> None:
    """Losses fall to so much of what they were, parameters are those of an unsharded run."""
    for name in ("shardcore", "torchrec"):
        line = next(x for x in output.splitlines() if x.startswith(name)).split()
        first, last, apart = float(line[2]), float(line[4]), float(line[-1])
        assert last < at_most * first
        assert apart < 1e-5
    times = next(x for x in output.splitlines() if x.startswith("step time"))
    assert re.findall(r"(\w+) over shardcore \d", times) == ["torchrec", "unsharded"]


@pytest.mark.long
def test_the_example_takes_the_batch_of_the_model_that_it_is_given(tmp_path):
    """The model of `make run` is for another batch than the example's own."""
    neural.save(trained(), tmp_path)
    codes, output = training.run_script(2, EXAMPLE, "--steps", "4", "--model", str(tmp_path))
    assert codes == [0, 0], output


@pytest.mark.long
def test_a_small_dlrmv3_trains_as_unsharded_with_hot_rows():
    codes, output = training.run_script(4, DLRMV3, "--check", "--steps", "4", "--samples", "64", limit_s=400)
    assert codes == [0] * 4, output
    arms = re.findall(r"([\d,]+) hot   rows moved by (\S+), (\S+) apart", output)
    assert len(arms) >= 3 and int(arms[-1][0]) > 0
    assert all(float(apart) < 1e-3 * float(moved) for _, moved, apart in arms)


@pytest.mark.long
def test_the_example_runs_under_torchrun_as_users_start_it():
    ran = subprocess.run(
        [
            sys.executable,
            *f"-m torch.distributed.run --standalone --nproc_per_node=2 {EXAMPLE} --check --steps 20".split(),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=EXAMPLE.parents[2],
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    said_of(ran.stdout, 0.97)


@pytest.mark.long
def test_wrapped_collections_train_beside_plain_ones():
    """EBC, EC, FPEBC, MC-EBC and MC-EC, by the planner and the sharders of each."""
    assert wrapped_training.train(2) == ["", ""]
