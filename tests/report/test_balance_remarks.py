"""A running job's step, and what even sequences would bring it."""

from dataclasses import replace

import job_folders
import numpy as np
import pytest

from shardcore.io import job_folder
from shardcore.plans.traced_job import read_job_traces
from shardcore.report.job_report import balance_remarks


def balance_of_job(folder, monkeypatch, lengths, sequence=True):
    """Remarks on a traced step whose ranks' samples have the given lengths in all features."""
    tables = tuple(replace(t, sequence=sequence) for t in job_folders.TABLES)
    monkeypatch.setattr(job_folders, "PROBLEM", replace(job_folders.PROBLEM, tables=tables))
    placed = {t.name: t for t in tables}
    monkeypatch.setattr(
        job_folders,
        "UNEVEN",
        replace(
            job_folders.UNEVEN,
            placements=tuple(
                replace(p, shard=replace(p.shard, table=placed[p.shard.table.name]))
                for p in job_folders.UNEVEN.placements
            ),
        ),
    )

    def lookups(rank, rng):
        of = np.resize(lengths[rank], job_folders.PROBLEM.local_batch)
        return {f"f-{t.name}": (rng.integers(0, 100, of.sum()), of) for t in tables}

    monkeypatch.setattr(job_folders, "lookups", lookups)
    job_folders.traced_step(folder)
    return balance_remarks(read_job_traces(folder))


def test_sequences_that_differ_between_ranks_are_named_with_what_shuffling_saves_at_most(
    tmp_path, monkeypatch
):
    """Ranks have 2 and 6 ids a sample. Of 2 ms of exchange a third could go; dense parts take as long."""
    [line] = balance_of_job(tmp_path, monkeypatch, ([2], [6]))
    assert "0.50 to 1.50 times the mean of ids" in line
    assert "would save at most 0.7 of 20.0 ms" in line
    assert " 0% of them is padding" in line


def test_padding_is_counted_to_the_longest_sample_of_each_rank(tmp_path, monkeypatch):
    [line] = balance_of_job(tmp_path, monkeypatch, ([2, 4], [8, 16]))
    assert " 25% of them is padding" in line


@pytest.mark.parametrize("lengths, sequence", [(([4], [4]), True), (([2], [6]), False)])
def test_even_sequences_and_pooled_features_are_not_named(tmp_path, monkeypatch, lengths, sequence):
    assert balance_of_job(tmp_path, monkeypatch, lengths, sequence) == []


def test_ranks_without_lookups_leave_nothing_to_say(tmp_path, monkeypatch):
    """One rank has none, and the other lacks a feature."""
    assert balance_of_job(tmp_path, monkeypatch, ([2], [6])) != []
    [step] = tmp_path.glob("step-*")
    (step / "rank-1.lookups.npz").unlink()
    job_folder.write_rank_measurements(step, 0, None, {"f-t0": (np.zeros(2, int), np.full(1, 2))})
    assert balance_remarks(read_job_traces(tmp_path)) == []
