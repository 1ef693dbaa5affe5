"""The datasets that are shipped in datasets/ are whole, and as their READMEs describe them."""

from pathlib import Path

import pytest

from shardcore.io import dataset

FOLDERS = sorted(p for p in (Path(__file__).parents[2] / "datasets").iterdir() if p.is_dir())


@pytest.mark.long
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_a_shipped_dataset_is_whole_and_small(folder):
    [setting] = dataset.dataset_settings(folder)
    compute, comm = (
        dataset.read_compute_samples(folder, setting),
        dataset.read_collective_samples(folder, setting),
    )
    repeats = dataset.repeated_samples(dataset.read_compute_timings(folder, setting))
    assert setting.hardware == folder.name
    assert sum(s.error is None for s in compute) >= 10_000 and sum(s.error is None for s in comm) >= 2_000
    assert sum(len(g) >= 3 for g in repeats) >= 300
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 10 << 20
    assert (folder / "README.md").exists()
