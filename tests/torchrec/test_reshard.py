"""Tables of running jobs move to other plans, exactly, or not at all."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import resharding

from shardcore.cost.move_rates import read_move_rates


def test_a_job_that_moved_is_as_one_that_never_did():
    """Weights and optimizer state, pooled and sequences, FP32 and FP16, whole, cut and replicated."""
    for moved, losses in resharding.in_processes(1, 2, resharding.move_both, [(1, "EXACT_ADAGRAD")], 1):
        assert all(x["apart"] < 1e-6 and x["tables"] and x["plan"] and x["digests"] for x in moved), moved
        # A pipeline was emptied and filled again, twice.
        assert losses == [pytest.approx(0, abs=1e-6)] * 6


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_cannot_move_stays_as_it_was(waits):
    found = resharding.in_processes(1, 2, resharding.refusals, waits)
    assert all(isinstance(x, dict) for x in found), found
    words = {
        "other plan on rank 1": "rank 1 was given another plan",
        "another model": "differing is 'inner.right'",
        "no room": "max_gib is 0.0",
        "no optimizer": "0 groups of the optimizer's parameters",
        "no plan": "the new plan is a str",
        "another optimizer": "the optimizer is a list",
        "another pipeline": "the pipeline is a object",
        "groups of ranks": "the model is a DMPCollection; tables of a DistributedModelParallel can be moved",
        "another TorchRec": "TorchRec is 2.0.0; tables were moved under 1.5 to 1.9",
        "a second move": "being moved",
        "ranks that cannot build": "OSError: no new shards here",
        "other rows": ".sum is other on its new shards",
    }
    if waits:
        words |= {
            "a rank that fails": "OSError: the memory of this rank is broken",
            "a rank that comes late": "late",
        }
    for rank, of_rank in enumerate(found):
        assert set(of_rank) == {*words, "at last"}
        for name, expected in words.items():
            if rank == 0 and name == "a rank that comes late":
                expected = "not all ranks have done 'plan'"
            assert expected in of_rank[name] and "not as it was" not in of_rank[name], (name, of_rank[name])
        assert of_rank["at last"].startswith("moved 5 tables, 0.0"), of_rank["at last"]


@pytest.mark.long
def test_cold_rows_move_beside_hot_ones():
    for tables, apart in resharding.in_processes(1, 2, resharding.move_hot_cold):
        assert tables and all(".cold." in name for name in tables), tables
        assert apart == [pytest.approx(0, abs=1e-6)] * 6


@pytest.mark.long
def test_what_a_module_wraps_stays_and_a_plan_that_moves_it_is_refused():
    for found in resharding.in_processes(1, 2, resharding.move_beside_wrapped):
        assert isinstance(found, list), found
        plain, *refused, apart = found
        assert plain == "bags.a rows.b" and float(apart) < 1e-6, (plain, apart)
        for words, path, kind in zip(
            refused,
            ("processed", "collided", "collided_rows"),
            ("FeatureProcessedEmbeddingBag", "ManagedCollisionEmbeddingBag", "ManagedCollisionEmbedding"),
            strict=True,
        ):
            assert f"the new plan changes module '{path}', a Sharded{kind}Collection" in words, words


@pytest.mark.long
def test_state_that_has_another_form_elsewhere_is_said_to():
    for found in resharding.in_processes(1, 2, resharding.lose_row_state):
        assert "its state 'sum' has a number a row of each part of columns" in found["refused"], found
        assert [list(x) for x in found["inexact"]] == [["bags.a"], ["bags.a"]]
        # Both parts have the mean of the whole, so that the mean of both is what it was.
        assert found["apart"] == 0


def test_rows_load_into_another_plan_without_the_old_one():
    for found in resharding.in_processes(1, 2, resharding.save_and_load, "EXACT_ADAGRAD"):
        assert found["apart"] == 0, found
        assert "and no optimizer here keeps it" in found["no optimizer"], found


@pytest.mark.parametrize(
    "new_s, ends", [(0.012, "rolled back"), pytest.param(0.008, "stayed", marks=pytest.mark.long)]
)
def test_a_job_follows_a_store_and_goes_back_where_steps_are_slower(new_s, ends, tmp_path):
    for found in resharding.in_processes(1, 2, resharding.follow, str(tmp_path), new_s):
        assert found["events"] == ["moved", ends], found
        assert found["apart"] < 1e-6
        back = ends == "rolled back"
        assert found["own plan"] == back and found["decision"] == ("rolled back" if back else "better")
        assert ("; predicted at most" in found["reason"]) == back
        [report] = found["report"]
        assert [(e["outcome"], e["step"]) for e in report["events"]] == [("moved", 4), (ends, 7)]
        assert (report["current"] in found["versions"]) == back
        assert report["events"][0]["tables"] and report["events"][0]["pause_s"] is not None


@pytest.mark.long
def test_a_job_that_cannot_go_back_trains_on(tmp_path):
    for found in resharding.in_processes(1, 2, resharding.follow, str(tmp_path), 0.012, False):
        assert found["events"] == ["moved", "stayed"] and not found["own plan"], found
        assert "the job cannot move back: the move takes" in found["reason"], found
        assert found["apart"] < 1e-6 and found["decision"] == "better"


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ADAGRAD"])
def test_rows_load_into_a_job_of_other_ranks(optimizer, tmp_path):
    saved = resharding.in_processes(2, 2, resharding.save, str(tmp_path / "rows"), optimizer)
    loaded = resharding.in_processes(1, 3, resharding.load, str(tmp_path / "rows"), optimizer)
    assert {*saved, *loaded} == {saved[0]} and saved[0], (saved, loaded)


@pytest.mark.long
def test_jobs_of_two_hosts_move():
    pairs = [(seed, optimizer) for seed in (10, 11) for optimizer in resharding.jobs.OPTIMIZERS]
    for of_rank in resharding.in_processes(2, 2, resharding.move_and_compare, pairs, 3):
        assert len(of_rank) == len(pairs), of_rank
        assert all(x["apart"] < 1e-6 and x["tables"] and x["plan"] for x in of_rank), of_rank


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.02, 0.3])
def test_a_rank_that_dies_leaves_the_old_plan(after_s):
    """Or the new one, once it is decided for."""
    found, dead = resharding.in_processes(1, 2, resharding.die, after_s)
    assert dead is None
    assert found["rows"] and found["plan"] == ("old" if found["error"] else "new"), found
    assert found["seconds"] < 20


@pytest.mark.long
def test_a_machine_s_rates_of_moves_are_measured_by_a_command(tmp_path):
    out = tmp_path / "rates.json"
    command = Path(resharding.__file__).parents[2] / "shardcore/__main__.py"
    codes, said = resharding.training.run_script(
        2, command, "job", "rates", "--mib", "1", "--repeats", "1", "--out", str(out)
    )
    assert codes == [0, 0], said
    rates = read_move_rates(out)
    assert list(rates.link_gbps) == ["within_host"] and rates.move_s > 0 and rates.digest_ns > 0


@pytest.mark.long
def test_groups_that_torchrec_makes_wait_no_longer_than_the_move():
    for rank, found in enumerate(resharding.in_processes(1, 2, resharding.wait_alone)):
        assert bool(found["error"]) == (rank == 0) and found["seconds"] < 20, found
        assert found["limits"] == [True, True] and found["call"] == "new_group", found
