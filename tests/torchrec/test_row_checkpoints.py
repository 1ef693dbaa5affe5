"""Rows and optimizer state in PyTorch Distributed Checkpoints: under any plan, by DCP too, whole or refused."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import checkpointing
import reshard_jobs as jobs

ROWWISE, ADAGRAD = "EXACT_ROWWISE_ADAGRAD", "EXACT_ADAGRAD"


@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.long)])
def test_rows_load_under_another_plan(ours):
    """Those of save_rows, and those that TorchRec's own job gave to DCP."""
    for found in checkpointing.in_processes(1, 2, checkpointing.pairs, [1, 2], [ROWWISE, ADAGRAD], ours):
        assert isinstance(found, list), found
        # TorchRec gives DCP no count of a fused optimizer's steps.
        assert all(x["apart"] == 0 and (not ours or len(set(x["steps"])) == 1) for x in found), found


@pytest.mark.long
@pytest.mark.parametrize("ours", [True, False])
def test_rows_load_under_each_pair_of_kinds(ours):
    optimizers = [*jobs.OPTIMIZERS, jobs.REPLICAS_ADAM]
    seeds = list(range(10, 22))
    for found in checkpointing.in_processes(2, 2, checkpointing.pairs, seeds, optimizers, ours):
        assert isinstance(found, list), found
        # TorchRec gives DCP no count of a fused optimizer's steps.
        assert all(x["apart"] == 0 and (not ours or len(set(x["steps"])) == 1) for x in found), found
        kinds = {tuple(pair) for x in found for pair in x["kinds"]}
        each = ("column", "row", "host_row", "data_parallel")
        assert {(a, b) for a in each for b in each} <= kinds, kinds


def test_dcp_reads_whole_tables_by_their_names():
    for found in checkpointing.in_processes(1, 2, checkpointing.read_by_dcp, ROWWISE):
        assert isinstance(found, dict), found
        assert found["tables"] == found["job"] == found.get("file", 0) == 0 and found["states"], found


@pytest.mark.long
def test_a_job_trains_while_it_saves():
    for found in checkpointing.in_processes(1, 2, checkpointing.save_while_training, ADAGRAD):
        assert isinstance(found, dict), found
        assert found["apart"] == [0, 0] and found["trained"] and found["done"], found
        assert "has a checkpoint already" in found["refused"], found


@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.long)])
def test_hot_rows_keep_their_optimizer(ours):
    """Adam, and the others row-wise Adagrad. Also of the checkpoint that DCP makes of such a job."""
    for found in checkpointing.in_processes(1, 2, checkpointing.hot_rows, ours):
        assert isinstance(found, dict), found
        assert found["hot"] == 0 and found["cold"] == [0, True], found
        assert "has state sum of table 'ec.a', and no optimizer" in found["other ids"], found


@pytest.mark.long
@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_cannot_write_is_heard_by_all(waits):
    for found in checkpointing.in_processes(1, 2, checkpointing.full_disk_on_a_rank, waits):
        assert isinstance(found, list), found
        assert "rank 1: " in found[0] and "File too large" in found[0], found
        assert "no .metadata" in found[1], found


@pytest.mark.long
def test_divided_tables_of_the_dense_kernel_are_refused():
    for found in checkpointing.in_processes(1, 2, checkpointing.dense_kernel):
        assert "table 't' of 'bags' has kernel dense, and is not on every rank" in found, found


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.2, 0.9, 1.7])
def test_what_was_saved_before_a_kill_loads(after_s, tmp_path):
    killed = checkpointing.in_processes(1, 2, checkpointing.save_until_killed, str(tmp_path), after_s)
    # One may die first, and the other lose its connection.
    assert None in killed and all(x is None or "Error" in x for x in killed), killed
    for found in checkpointing.in_processes(1, 2, checkpointing.load_what_was_saved, str(tmp_path)):
        assert isinstance(found, dict), found
        *before, last = found.values()
        assert before == [[float(i)] for i in range(len(before))], found
        assert last == [float(len(before))] or "no .metadata" in last, found


@pytest.mark.long
def test_a_save_and_a_load_take_some_chunks_of_memory():
    """Far less than the table of 1 GiB. What an allocator keeps of the chunks differs from run to run."""
    (found,) = checkpointing.in_processes(1, 1, checkpointing.peak_mib, 1024)
    assert isinstance(found, list) and max(found) < 400, found


@pytest.mark.long
def test_a_table_larger_than_the_memory_that_is_left_is_saved_and_loaded(tmp_path):
    script = Path(__file__).parent / "large_checkpoint.py"
    command = [sys.executable, script, "--gib", "1", "--mib", "512", "--folder", tmp_path / "large"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "all bytes are equal"
