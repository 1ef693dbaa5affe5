"""What `evaluate` does where plans cannot be replayed (tests/flows replays some): it says why, and claims nothing."""

import dataclasses
import json
import logging
import re

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool

from shardcore import files
from shardcore.cost import fit, neural
from shardcore.measure import hardware
from shardcore.types import ShardCoreError
from tasks import evaluate
from tasks.evaluate import EvaluateConfig, replay_plans, write_metrics

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def model():
    return fit.train(compute_samples(linear_law, 60), comm_samples(20), SETTING, fit.FitConfig(epochs=1)).model


@pytest.mark.parametrize("here, problems, said", [
    (False, 2, r"the model is for \(law, batch 256.*\), the cluster's devices are "),
    (True, 2, "no host has two devices"),  # each host of this cluster has one CPU
    (True, 0, "evaluate.replay_problems is 0"),
], ids=["other hardware", "one core a host", "switched off"])
def test_what_cannot_be_replayed_is_skipped_with_a_line_and_absent(here, problems, said, model, tmp_path, monkeypatch, caplog):
    if here:
        model = dataclasses.replace(model, setting=dataclasses.replace(SETTING, hardware=hardware.hardware_name("cpu")))
    neural.save(model, tmp_path / "model")
    files.write_pool(tmp_path / "pool.json", pool())
    out = tmp_path / "replays"
    out.mkdir()
    (out / "replays.csv").write_text("of another model")
    monkeypatch.setattr(evaluate, "get_run_logger", lambda: logging.getLogger("evaluate"))
    with caplog.at_level(logging.INFO, "evaluate"):
        found = replay_plans.fn(tmp_path / "model", tmp_path / "pool.json", tmp_path, EvaluateConfig(replay_problems=problems),
                                out)
    assert found == {} and not list(out.iterdir())
    assert re.search(f"no plans are replayed: {said}", caplog.text), caplog.text
    write_metrics.fn(tmp_path, {"compute_mape": 1.0}, {}, found)
    assert "reality" not in json.loads((tmp_path / "metrics.json").read_text())


@pytest.mark.parametrize("values", [{"replay_problems": -1}, {"replay_repeats": 0}])
def test_bad_values_are_refused(values):
    with pytest.raises(ShardCoreError, match="replay_problems of 0 or more"):
        EvaluateConfig(**values)
