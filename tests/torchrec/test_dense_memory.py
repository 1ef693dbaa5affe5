"""The memory of a model's dense part, by hand and in TorchRec's real processes."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job

pytest.importorskip("torchrec")
import peaks
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from shardcore.torchrec.dense_memory import measured_job

BATCH, DIM, WIDTH = 8, 16, 32


@dataclass
class Batch:
    features: KeyedJaggedTensor
    labels: torch.Tensor


class Model(nn.Module):
    """A table of a million rows, and a layer. Its activations are the layer's outputs, and the loss."""

    def __init__(self, dense: str = "cpu", sequence: bool = False) -> None:
        super().__init__()
        of_table = {"name": "t", "embedding_dim": DIM, "num_embeddings": 10**6, "feature_names": ["f"]}
        kind, config = EmbeddingBagCollection, EmbeddingBagConfig(**of_table)
        if sequence:
            kind, config = EmbeddingCollection, EmbeddingConfig(**of_table)
        self.tables = kind(tables=[config], device=torch.device("meta"))
        self.layer = nn.Linear(DIM, WIDTH, device=dense)

    def forward(self, batch):
        found = self.tables(batch.features)
        out = self.layer((found["f"] if isinstance(found, dict) else found).values())
        return out.sum() + batch.labels.sum(), out


def batch() -> Batch:
    lengths = torch.ones(BATCH, dtype=torch.int32)
    return Batch(KeyedJaggedTensor(["f"], values=torch.arange(BATCH), lengths=lengths), torch.zeros(BATCH, 1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dense", ["cpu", "meta"])
def test_weights_and_gradients_and_activations_of_a_layer_by_hand(dense, sequence):
    model = Model(dense, sequence)
    job = measured_job(model, batch(), sgd, Job("fused", id_bytes=4), on_cpu=True)
    weights, outputs, inputs = 4 * (DIM * WIDTH + WIDTH), 4 * BATCH * WIDTH, 4 * BATCH * DIM
    assert job.dense_bytes == 2 * weights  # SGD has no state; gradients are in DDP's buckets
    assert (job.pipeline, job.id_bytes, job.input_bytes) == ("fused", 4, 4 * BATCH)
    # At the end of backward, the gradients of the layer's weights exist before they go to buckets.
    assert outputs - inputs <= job.activation_bytes <= 2 * outputs + weights
    assert {p.device.type for p in model.parameters() if p.shape[0] != 10**6} == {dense}


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_state_of_an_optimizer_and_what_it_takes_to_update(on_cpu):
    """On GPUs torch updates all parameters at once."""
    model = Model()
    model.layer = nn.Sequential(nn.Linear(DIM, WIDTH), nn.Linear(WIDTH, WIDTH))
    weights = [4 * (n * WIDTH + WIDTH) for n in (DIM, WIDTH)]
    job = measured_job(model, batch(), torch.optim.Adam, on_cpu=on_cpu)
    assert job.dense_bytes == pytest.approx(4 * sum(weights), abs=64)
    least = 4 * WIDTH * WIDTH if on_cpu else sum(weights)
    assert least <= job.update_bytes <= 3 * (max(weights) if on_cpu else sum(weights))


def test_a_model_without_a_loss_or_with_nothing_dense_is_refused_in_one_line():
    class Outputs(Model):
        def forward(self, batch):
            return super().forward(batch)[1].detach()

    with pytest.raises(ShardCoreError, match="the model gives Tensor first; it needs to be the loss"):
        measured_job(Outputs(), batch(), sgd)
    with pytest.raises(ShardCoreError, match="the model is a collection itself"):
        measured_job(Model().tables, batch(), sgd)
    with pytest.raises(ShardCoreError, match="module is 3; it needs to be a torch.nn.Module"):
        measured_job(3, batch(), sgd)


def test_features_with_batches_of_their_own_are_refused():
    lengths, strides = torch.ones(4, dtype=torch.int32), [[4]]
    of_features = KeyedJaggedTensor(["f"], torch.arange(4), lengths=lengths, stride_per_key_per_rank=strides)
    with pytest.raises(ShardCoreError, match="batches of their own sizes"):
        measured_job(Model(), replace(batch(), features=of_features), sgd)


@pytest.mark.long
def test_the_count_of_a_job_with_a_dense_part_is_its_peak_under_every_pipeline():
    """Within 5%, and at most 1% below: memory_peaks.py has 40 such jobs."""
    seeds = range(5)
    given = [peaks.drawn_module(seed) for seed in seeds]
    for seed, (_, plan, _), found in zip(seeds, given, peaks.measured(given), strict=True):
        row = peaks.counted_of(peaks.counted_module(seed), plan, found)
        assert all(-0.03 <= share <= 0.07 for share in peaks.off(row, "used_bytes")), row
