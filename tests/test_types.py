import pickle
import subprocess
import sys

import pytest

from shardcore.types import (
    CommRequest,
    Device,
    Placement,
    Problem,
    Reuse,
    Setting,
    SettingMismatch,
    Shard,
    ShardCoreError,
    Table,
    Topology,
    Zipf,
)

STILL = (0.0, 0.0)


@pytest.mark.parametrize("make, named", [
    (lambda: Table("t", 0, 8, 1.0), ["'t'", "0 rows"]),
    (lambda: Table("t", 10, 6, 1.0), ["'t'", "dim 6", "multiple of 4"]),
    (lambda: Table("t", 10, 8, -1.0), ["'t'", "pooling -1.0"]),
    (lambda: Table("t", 10, 8, float("nan")), ["'t'", "nan"]),
    (lambda: Table("t", 10, 8, 1.0, precision="fp8"), ["fp8", "fp32"]),
    (lambda: Table("t", 10, 8, 1.0, Reuse((0.0,) * 17, 4)), ["'t'", "empty reuse histogram"]),
    (lambda: Reuse((0.5,) * 17, 4), ["8.5", "sum to 1"]),
    (lambda: Reuse((1.0,), 4), ["1 bins", "17"]),
    (lambda: Zipf(-1), ["-1"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 0, 11, 0, 8), ["'t'", "[0, 11)", "[0, 10)"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 2, 8), ["[2, 8)", "multiples of 4"]),
    (lambda: Placement(Shard.whole(Table("t", 10, 8, 1.0)), (1, 1)), ["(1, 1)"]),
    (lambda: Device(0), ["memory_bytes 0"]),
    (lambda: Topology(()), ["no devices"]),
    (lambda: Problem("p", (Table("t", 10, 8, 1.0),) * 2, Topology((Device(1),)), 4), ["'p'", "'t'"]),
    (lambda: Problem("p", (Table("t", 10, 8, 1.0),), Topology((Device(1),) * 3), 4), ["global_batch 4", "3 devices"]),
    (lambda: Problem("../p", (Table("t", 10, 8, 1.0),), Topology((Device(1),)), 4), ["'../p'", "folder"]),
    (lambda: Topology((Device(1),), latency_ms=-1.0), ["latency_ms -1.0"]),
    (lambda: CommRequest((8,), 4, (0.0,)), ["(8,)", "at least 2"]),
    (lambda: CommRequest((0, 0), 4, STILL), ["(0, 0)", "above 0"]),
    (lambda: CommRequest((8, 8), 5, STILL), ["batch 5", "2 ranks"]),
    (lambda: CommRequest((8, 8), 4, (0.0,)), ["start_ms (0.0,)", "2 ranks"]),
    (lambda: CommRequest((8, 8), 4, STILL, "broadcast"), ["'broadcast'", "reduce_scatter"]),
    (lambda: CommRequest((8, 4), 4, STILL, "all_reduce"), ["(8, 4)", "one width"]),
    (lambda: CommRequest((8, 8), 4, STILL, payload="fp8"), ["'fp8'", "bf16"]),
    (lambda: CommRequest((8, 8), 4, STILL, hosts=3), ["hosts 3", "2 ranks"]),
    (lambda: Setting("a/b", 4), ["'a/b'"]),
    (lambda: Setting("x", 0), ["batch 0"]),
    (lambda: Setting("x", 1, optimizer="adam"), ["'adam'", "exact_sgd"]),
])
def test_bad_values_are_named(make, named):
    with pytest.raises(ShardCoreError) as error:
        make()
    assert all(word in str(error.value) for word in named), str(error.value)


def test_a_problem_of_another_setting_is_refused_with_both_shown(problem):
    problem.require_setting(Setting("anything", 256))  # a topology without hardware takes the model's
    with pytest.raises(SettingMismatch) as error:
        problem.require_setting(Setting("nvidia-h200", 65536))
    assert "batch 256" in str(error.value) and "batch 65536" in str(error.value)


def test_a_table_stays_a_key_across_processes(tables):
    hash(tables[0])
    code = ("import pickle, sys; from shardcore.types import Table; t = pickle.load(sys.stdin.buffer); "
            "import dataclasses; assert t in {dataclasses.replace(t): 1}")
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(tables[0]), check=True)


def test_equal_tables_have_equal_files():
    from shardcore import files

    assert files.table_to_json(Table("t", 3, 4, 1)) == files.table_to_json(Table("t", 3, 4, 1.0))
