"""Training on folders, as the command and the pipeline do it: what a model says of its data, and how it is
judged."""

import dataclasses

import pytest
from laws import SETTING, cache_law, comm_samples, compute_samples, linear_law, pool

from shardcore.core.errors import ShardCoreError
from shardcore.cost import accuracy, drift_correction, fit, neural, training
from shardcore.io import dataset, replays

CONFIG = fit.FitConfig(epochs=1, hidden=(4,))


@pytest.fixture
def measured(tmp_path):
    """Folder a of this machine, b of a slower one, c of a GPU, and d of no machine: it is empty."""
    compute = [
        dataclasses.replace(s, software=f"torch {i % 2}")
        for i, s in enumerate(compute_samples(linear_law, 60))
    ]
    write(tmp_path / "a", compute, comm_samples(40))
    for folder, hardware in (("b", "cpu-slower"), ("c", "gpu")):
        setting = dataclasses.replace(SETTING, hardware=hardware)
        write(tmp_path / folder, compute_samples(cache_law, 80, setting), comm_samples(40, setting=setting))
    (tmp_path / "d").mkdir()
    return tmp_path


def write(folder, compute, comm=()):
    dataset.write_compute_samples(folder, compute, dataset.write_pool(folder, pool()))
    if comm:
        dataset.write_collective_samples(folder, comm)


def test_a_model_names_its_data_and_what_its_trainer_adds(measured):
    said = []
    data = training.read_training_data(measured / "a", SETTING)
    assert str(data) == (
        f"training for {SETTING} on 59 groups, 40 exchanges, 0 replayed and 0 traced steps of {measured / 'a'}"
    )
    assert data.warnings == [
        "samples were measured with different software: torch 0; torch 1; if their "
        "timings differ, train on those of one"
    ]
    found = training.train(
        data, CONFIG, lambda model, epoch, values: said.append((model, epoch)), provenance={"seed": 3}
    )
    assert found.model.meta["provenance"] == {"data": replays.datasets_digest([data.folder]), "seed": 3}
    assert ("compute", 1) in said and found.of_steps == "" and found.auxiliary_notes == ()
    alone = fit.train(data.known.compute, data.known.comm, SETTING, CONFIG).model
    assert all((found.model.weights[name] == w).all() for name, w in alone.weights.items())


def test_samples_of_other_hardware_of_the_same_kind_lend_and_are_on_record(measured):
    data = training.read_training_data(measured / "a", SETTING, [measured / "c"])
    assert [x.hardware for x in data.auxiliary] == ["gpu"] and len(data.known.compute) == 59
    n = len(data.auxiliary[0].known.compute)
    assert str(data).endswith(f"; {n} groups and 40 exchanges of {measured / 'c'} (gpu) may lend their shape")
    found = training.train(data, CONFIG)
    auxiliary = found.model.meta["provenance"]["lent"][str(measured / "c")]
    assert (auxiliary["hardware"], auxiliary["groups"], auxiliary["exchanges"]) == ("gpu", n, 40)
    assert auxiliary["digest"] == replays.dataset_digest(measured / "c")
    assert found.auxiliary_notes == (f"{measured / 'c'} {auxiliary['words']}",)
    assert found.model.meta["samples"]["compute_train"] < 60
    for folder in ("a", "c"):
        neural.save(found.model, measured / folder / "model")
    assert neural.load(measured / "a" / "model").meta == found.model.meta


def test_a_lender_is_read_as_far_as_its_law_trains_and_own_samples_are_read_whole(measured, monkeypatch):
    monkeypatch.setattr(drift_correction, "MOST_AUXILIARY_SAMPLES", 7)
    data = training.read_training_data(measured / "a", SETTING, [measured / "c"])
    assert len(data.known.compute) == 59 and len(data.auxiliary[0].known.compute) == 7


@pytest.mark.parametrize("folder, held", [("b", ".*hardware: cpu-slower against .*"), ("d", "none")])
def test_a_folder_that_can_lend_nothing_is_named(measured, folder, held):
    with pytest.raises(
        ShardCoreError,
        match=rf"{folder} holds samples of other settings than .*a: {held}; to lend their shape",
    ):
        training.read_training_data(measured / "a", SETTING, [measured / folder])


def test_a_model_is_judged_by_own_groups_and_exchanges_of_one_split(measured):
    data = training.read_training_data(measured / "a", SETTING, [measured / "c"])
    model = training.train(data, CONFIG).model
    for split in ("train", "test"):
        own = [
            [s for s in samples if dataset.split_of_sample(s.id) == split]
            for samples in (data.known.compute, data.known.comm)
        ]
        found = training.judge_model(model, data.known, split)
        assert (found["n_compute"], found["n_comm"]) == tuple(map(len, own))
        assert found == accuracy.evaluate_accuracy(model, *own)


def test_held_out_samples_are_own_ones_and_a_folder_without_any_is_named(measured):
    data = training.read_training_data(measured / "a", SETTING, [measured / "c"])
    model = training.train(data, CONFIG).model
    assert {s.id for s in training.read_held_out_samples(model, measured / "a").compute} == {
        s.id for s in data.known.compute
    }
    few = [s for s in data.known.compute if dataset.split_of_sample(s.id) == "train"]
    write(measured / "e", few)
    with pytest.raises(ShardCoreError, match=r"e holds no held-out samples for \(law.*measure more"):
        training.read_held_out_samples(model, measured / "e")
