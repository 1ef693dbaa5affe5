"""The commands on measurements."""

import re
import sys
from contextlib import contextmanager

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool

from shardcore.cli import main, measurements, train
from shardcore.cli.progress_line import ProgressLine
from shardcore.core import progress
from shardcore.cost import known_errors, neural
from shardcore.io import dataset, replays


@pytest.fixture
def heard(monkeypatch):
    """Phases that a command reports, which it shows from its second second (test_progress_line.py)."""
    phases = []

    @contextmanager
    def listened(phase=""):
        with progress.report_to_listener(lambda phase, *_: phases.append(phase)):
            progress.report(phase)
            yield ProgressLine(sys.stderr, silent_s=3600)

    for command in (measurements, train):
        monkeypatch.setattr(command, "showing_progress", listened)
    return phases


@pytest.mark.usefixtures("few_epochs")
def test_a_trained_model_names_its_data_whatever_the_order_of_folders(tmp_path, capsys, heard, few_epochs):
    folders = [tmp_path / name for name in ("a", "b")]
    samples = list({s.id: s for s in compute_samples(linear_law, 120)}.values())
    for folder, some in zip(folders, (samples[::2], samples[1::2]), strict=True):
        folder.mkdir()
        dataset.write_compute_samples(folder, some, dataset.write_pool(folder, pool()))
    dataset.write_collective_samples(folders[0], comm_samples(20))
    digest = replays.datasets_digest(folders)
    assert digest == replays.datasets_digest(folders[::-1]) != replays.datasets_digest(folders[:1])
    assert main(["train", *map(str, folders), "--out", str(tmp_path / "model")]) == 0
    assert any(re.match(r"epochs: \d+ of \d+.*; train_loss ", phase) for phase in heard)
    assert heard[-1] == "judging the model"
    model = neural.load(tmp_path / "model")
    assert model.meta["provenance"]["data"] == digest
    assert f"{tmp_path / 'model'}: {SETTING}, data {digest[:8]}" in capsys.readouterr().err
    assert known_errors.model_label(model) == f"{SETTING}, data {digest[:8]}"


def test_a_start_that_is_neither_a_model_nor_a_profile_names_the_profiles(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    dataset.write_compute_samples(data, compute_samples(linear_law, 30), dataset.write_pool(data, pool()))
    assert main(["train", str(data), "--start", "h100", "--out", str(tmp_path / "model")]) == 1
    assert "error: profile 'h100' is not known; known are " in capsys.readouterr().err
