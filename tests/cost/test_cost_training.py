"""Training on folders, as the command and the pipeline do it: what a model says of its data, and how it is
judged."""

import dataclasses

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool

from shardcore.core.errors import ShardCoreError
from shardcore.cost import accuracy, fit, training
from shardcore.io import dataset, replays

CONFIG = fit.FitConfig(epochs=1, hidden=(4,))


@pytest.fixture
def measured(tmp_path):
    # One of them was drawn twice.
    compute = [
        dataclasses.replace(s, software=f"torch {i % 2}")
        for i, s in enumerate(compute_samples(linear_law, 80))
    ]
    for folder, some in (("a", compute[:60]), ("b", compute[60:])):
        dataset.write_compute(tmp_path / folder, some, dataset.write_pool(tmp_path / folder, pool()))
    dataset.write_comm(tmp_path / "a", comm_samples(40))
    return tmp_path


def test_a_model_names_its_data_and_what_its_trainer_adds(measured):
    folders, said = [measured / "a", str(measured / "b")], []
    data = training.read(folders, SETTING)
    assert str(data).startswith(
        f"training for {SETTING} on 79 groups, 40 exchanges, 0 replayed and 0 traced steps of "
    )
    assert data.warnings == [
        "samples were measured with different software: torch 0; torch 1; if their "
        "timings differ, train on those of one"
    ]
    found = training.train(
        data, CONFIG, lambda model, epoch, values: said.append((model, epoch)), provenance={"seed": 3}
    )
    assert found.model.meta["provenance"] == {"data": replays.data_digest(data.folders), "seed": 3}
    assert ("compute", 1) in said and found.of_steps == ""
    alone = fit.train(data.known.compute, data.known.comm, SETTING, CONFIG).model
    assert all((found.model.weights[name] == w).all() for name, w in alone.weights.items())


def test_a_model_is_judged_by_groups_and_exchanges_of_one_split(measured):
    data = training.read([measured / "a", measured / "b"], SETTING)
    model = training.train(data, CONFIG).model
    for split in ("train", "test"):
        own = [
            [s for s in samples if dataset.split_of(s.id) == split]
            for samples in (data.known.compute, data.known.comm)
        ]
        found = training.judge(model, data.known, split)
        assert (found["n_compute"], found["n_comm"]) == tuple(map(len, own))
        assert found == accuracy.evaluate(model, *own)


def test_held_out_samples_of_datasets_that_joined_count_and_none_is_refused_by_name(measured):
    data = training.read([measured / "a"], SETTING)
    joined = training.train(data, CONFIG, provenance={"datasets": {str(measured / "b"): "of test"}}).model
    assert len(training.read_held_out(joined, measured / "a").compute) == 79
    few = [s for s in data.known.compute if dataset.split_of(s.id) == "train"]
    dataset.write_compute(measured / "c", few, dataset.write_pool(measured / "c", pool()))
    alone = training.train(data, CONFIG).model
    with pytest.raises(ShardCoreError, match=r"c holds no held-out samples for \(law.*measure more"):
        training.read_held_out(alone, measured / "c")
