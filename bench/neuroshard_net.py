"""NeuroShard's network of an op's time: as published, with our loss, and with our loss and features.

MLSys 2023: 20 features a table (rows, dim, pooling, 17 reuse bins; here standardised) -> 128 -> 32, summed
over the group, -> 64 -> 1, to ms; mean squared error, Adam 1e-3, batch 512, 1,000 epochs, the epoch with the
best validation error kept. All arms have these layers, optimizer and epochs. Our loss is of ratios and knows
forward and backward apart: its arms have an output for each, kept positive, and keep the epoch with the best
mean relative error on the validation split, as ours does.

Shapes: S groups, N shards, F features, G outputs of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardcore.core.access_statistics import Reuse
from shardcore.core.types import Shard
from shardcore.cost import features, fit
from shardcore.cost.metrics import mape
from shardcore.io.dataset import split_of_sample
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.step import access
from shardcore.tables import streams

BATCH, LEARNING_RATE = 512, 1e-3


def table_features(shard: Shard, batch: int) -> list[float]:
    """NeuroShard's 20 table features, computed for a shard."""
    reuse = shard.table.access
    if not isinstance(reuse, Reuse):
        reuse = access.reuse_from_ids(streams.draw_lookups(shard.table, batch)[0], batch)
    return [shard.rows, shard.width, shard.table.pooling * access.access_share(shard), *reuse.bins]


def published_features(request: ComputeRequest) -> np.ndarray:
    return np.array([table_features(s, request.batch) for s in request.shards])


def our_features(request: ComputeRequest) -> np.ndarray:
    """Our model's features of each shard: 13 amounts of work, and 9 conditions as logarithms."""
    return np.concatenate(features.shard_features(request.shards, request.batch), 1)


@dataclass(frozen=True)
class Recipe:
    """A network to train: its features and outputs.

    features: [N, F] of a group's shards.
    outputs: of a group: 1 for forward + backward, 2 for each of them.
    ms: [S, G] ms from the last layer's outputs.
    loss: of predicted ms [S, G] against measured forward and backward [S, 2].
    kept_by: error on the validation split of the epoch to keep, of the same.
    """

    features: Callable[[ComputeRequest], np.ndarray]
    outputs: int
    ms: Callable[[torch.Tensor], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    kept_by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def squared_error(found: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(found.sum(1), measured.sum(1))


def relative_error(found: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    return (found.sum(1) / measured.sum(1) - 1).abs().mean()


_OURS = {
    "outputs": 2,
    "ms": torch.nn.functional.softplus,
    "loss": fit.log_ratio_loss,
    "kept_by": relative_error,
}
RECIPES = {
    "NeuroShard's network": Recipe(
        features=published_features, outputs=1, ms=lambda x: x, loss=squared_error, kept_by=squared_error
    ),
    "the same, our loss": Recipe(features=published_features, **_OURS),
    "the same, our loss and features": Recipe(features=our_features, **_OURS),
}


class NeuroShardNet(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        relu = torch.nn.ReLU
        self.table = torch.nn.Sequential(torch.nn.Linear(inputs, 128), relu(), torch.nn.Linear(128, 32))
        self.group = torch.nn.Sequential(torch.nn.Linear(32, 64), relu(), torch.nn.Linear(64, outputs))

    def forward(self, tables: torch.Tensor, sizes: np.ndarray) -> torch.Tensor:
        """Network outputs [S, G] of groups, from features of their tables [N, F] and group sizes [S]."""
        group = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        return self.group(torch.zeros(len(sizes), 32).index_add(0, group, self.table(tables)))


@dataclass(frozen=True, eq=False)
class _Groups:
    """Measured groups of tables. tables: [N, F] features of the tables of all groups. sizes: [S] tables of each.
    measured: [S, 2] ms, forward and backward.
    """

    tables: torch.Tensor
    sizes: np.ndarray
    measured: torch.Tensor

    def shuffled_batches(self, order: np.ndarray) -> Iterator[_Groups]:
        ends = np.cumsum(self.sizes)
        for chosen in (order[i : i + BATCH] for i in range(0, len(order), BATCH)):
            sizes = self.sizes[chosen]
            first = np.repeat(ends[chosen] - sizes, sizes)
            within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            yield _Groups(
                self.tables[torch.from_numpy(first + within)], sizes, self.measured[torch.from_numpy(chosen)]
            )


def train_network(
    groups: Sequence[ComputeSample], recipe: Recipe, seed: int, epochs: int
) -> tuple[Callable[[Sequence[ComputeRequest]], np.ndarray], list[float]]:
    """Train a network. Returns a predictor of [S] ms of groups, and validation errors by epoch, in percent."""
    torch.manual_seed(seed)
    rng, side = np.random.default_rng(seed), {}
    for name in ("train", "validation"):
        samples = [s for s in groups if split_of_sample(s.id) == name]
        side[name] = (
            [recipe.features(s.request) for s in samples],
            [[s.forward.median_ms, s.backward.median_ms] for s in samples],
        )
    known = np.concatenate(side["train"][0])
    mean, spread = known.mean(0), np.where(known.std(0) > 1e-9, known.std(0), 1.0)

    def standardise_features(found: Sequence[np.ndarray]) -> tuple[torch.Tensor, np.ndarray]:
        return (
            torch.tensor((np.concatenate(found) - mean) / spread, dtype=torch.float32),
            np.array([len(x) for x in found]),
        )

    trained, unseen = (
        _Groups(*standardise_features(found), torch.tensor(measured)) for found, measured in side.values()
    )
    net = NeuroShardNet(known.shape[1], recipe.outputs)
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    best, kept, curve = np.inf, net.state_dict(), []
    for _ in range(epochs):
        for some in trained.shuffled_batches(rng.permutation(len(trained.sizes))):
            loss = recipe.loss(recipe.ms(net(some.tables, some.sizes)), some.measured)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            found = recipe.ms(net(unseen.tables, unseen.sizes))
            error = float(recipe.kept_by(found, unseen.measured))
        curve.append(mape(found.sum(1).numpy(), unseen.measured.sum(1).numpy()))
        if error < best:
            best, kept = error, {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict(kept)

    @torch.no_grad()
    def predict(requests: Sequence[ComputeRequest]) -> np.ndarray:
        found = recipe.ms(net(*standardise_features([recipe.features(r) for r in requests])))
        return found.sum(1).numpy().astype(float)

    return predict, curve
