"""The compute model against NeuroShard's published network: same samples, same split, one run.

    python -m bench.models DATASET                  # a folder that `measure` wrote
    python -m bench.models DATASET --seeds 5        # mean and standard deviation over five seeds

NeuroShard (MLSys 2023): 20 features a table (rows, dim, pooling, 17 reuse bins; here standardised) -> 128 -> 32, summed over
the group, -> 64 -> 1, to ms; mean squared error, Adam 1e-3, batch 512, 1,000 epochs, the epoch with the best validation error
kept. `physical rates` is our model before its correction is learned. `lowered by a shard more` counts additions of a random
measured shard to a test group that lower the predicted cost. Errors are of forward + backward on the test split.

Shapes: S groups, N shards, F features.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardcore import dataset, streams
from shardcore.cost import fit
from shardcore.cost.model import group_costs
from shardcore.types import ComputeRequest, ComputeSample, Reuse, Shard, ShardCoreError

Predict = Callable[[Sequence[ComputeRequest]], np.ndarray]
ADDITIONS = 10_000


@dataclass(frozen=True)
class Result:
    mape: float
    tau: float
    rmse_ms: float
    lowered: float
    train_s: float


def table_features(shard: Shard, batch: int) -> list[float]:
    """NeuroShard's 20 features of a table, of a shard's part of it."""
    access = shard.table.access
    if not isinstance(access, Reuse):
        access = streams.reuse_of(streams.stream(shard.table, batch)[0], batch)
    return [shard.rows, shard.width, shard.table.pooling * streams.access_share(shard), *access.bins]


class NeuroShardNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        relu = torch.nn.ReLU
        self.table = torch.nn.Sequential(torch.nn.Linear(20, 128), relu(), torch.nn.Linear(128, 32))
        self.group = torch.nn.Sequential(torch.nn.Linear(32, 64), relu(), torch.nn.Linear(64, 1))

    def forward(self, tables: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
        """[S] ms from tables [N, 20] and the group that each belongs to [N]."""
        return self.group(torch.zeros(groups, 32).index_add(0, group, self.table(tables))).squeeze(1)


def train_neuroshard(train: Sequence[ComputeSample], validation: Sequence[ComputeSample], seed: int, epochs: int) -> Predict:
    torch.manual_seed(seed)
    net, rng = NeuroShardNet(), np.random.default_rng(seed)
    raw = np.concatenate([[table_features(s, x.request.batch) for s in x.request.shards] for x in train])
    mean, spread = raw.mean(0), np.maximum(raw.std(0), 1e-9)

    def inputs(requests: Sequence[ComputeRequest]) -> list[torch.Tensor]:
        return [torch.tensor((np.array([table_features(s, r.batch) for s in r.shards]) - mean) / spread, dtype=torch.float32)
                for r in requests]

    def run(groups: Sequence[torch.Tensor]) -> torch.Tensor:
        return net(torch.cat(list(groups)), torch.repeat_interleave(torch.tensor([len(g) for g in groups])), len(groups))

    x, y = inputs([s.request for s in train]), torch.tensor(total_ms(train), dtype=torch.float32)
    unseen, goal = inputs([s.request for s in validation]), total_ms(validation)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    best, kept = np.inf, net.state_dict()
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for start in range(0, len(x), 512):
            chosen = order[start : start + 512]
            loss = torch.nn.functional.mse_loss(run([x[i] for i in chosen]), y[torch.from_numpy(chosen)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            error = float(((run(unseen).numpy() - goal) ** 2).mean())
        if error < best:
            best, kept = error, {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict(kept)

    @torch.no_grad()
    def predict(requests: Sequence[ComputeRequest]) -> np.ndarray:
        return run(inputs(requests)).numpy().astype(float)

    return predict


def total_ms(samples: Sequence[ComputeSample]) -> np.ndarray:
    return np.array([s.total_ms for s in samples])


def assess(predict: Predict, test: Sequence[ComputeSample], train_s: float, seed: int) -> Result:
    measured, predicted = total_ms(test), predict([s.request for s in test])
    rng = np.random.default_rng(seed)
    shards = [s for x in test for s in x.request.shards]
    before = [test[i].request for i in rng.integers(0, len(test), ADDITIONS)]
    after = [ComputeRequest((*r.shards, shards[rng.integers(len(shards))]), r.batch) for r in before]
    return Result(100 * float(np.mean(np.abs(predicted / measured - 1))), fit.kendall_tau(predicted, measured),
                  float(np.sqrt(((predicted - measured) ** 2).mean())), 100 * float(np.mean(predict(after) < predict(before))),
                  train_s)


def models(compute: Sequence[ComputeSample], comm: Sequence, seed: int, epochs: int) -> dict[str, tuple[Predict, float]]:
    """Each model trained on the train and validation splits, and the seconds that took."""
    sides = {side: [s for s in compute if fit.split_of(s.id) == side] for side in ("train", "validation")}
    found = {}

    def ours(config: fit.FitConfig) -> Predict:
        model = fit.train(compute, comm, compute[0].setting, config).model
        return lambda requests: np.array([group_costs([r.shards], model, r.batch)[0] for r in requests])

    for name, make in (
        ("NeuroShard's network", lambda: train_neuroshard(sides["train"], sides["validation"], seed, epochs)),
        ("physical rates", lambda: ours(fit.FitConfig(seed=seed, epochs=1, learning_rate=1e-12))),
        ("ShardCore", lambda: ours(fit.FitConfig(seed=seed))),
    ):
        start = time.perf_counter()
        predict = make()
        found[name] = predict, time.perf_counter() - start
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="folder of measurements of one setting")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of initial weights and order (default: 1)")
    parser.add_argument("--epochs", type=int, default=1000, help="of NeuroShard's network (default: 1000)")
    args = parser.parse_args()
    settings = dataset.settings(args.dataset)
    if len(settings) != 1:
        raise ShardCoreError(f"{args.dataset} holds samples of [{'; '.join(map(str, settings))}]; this bench needs one setting")
    compute = [s for s in dataset.read_compute(args.dataset, settings[0]) if s.error is None]
    comm, test = dataset.read_comm(args.dataset, settings[0]), fit.held_out(compute)
    torch.set_num_threads(1)
    results: dict[str, list[Result]] = {}
    for seed in range(args.seeds):
        for name, (predict, seconds) in models(compute, comm, seed, args.epochs).items():
            results.setdefault(name, []).append(assess(predict, test, seconds, seed))
    iqr = np.median([(s.forward.q3_ms - s.forward.q1_ms + s.backward.q3_ms - s.backward.q1_ms) / t
                     for s, t in zip(test, total_ms(test), strict=True)])
    print(f"{settings[0]}: {len(compute)} groups, {len(test)} of them held out; {args.seeds} seeds")
    print(f"repeats of one group: interquartile range {100 * iqr:.1f}% of the total (median over the held-out groups)\n")
    print(f"{'model':22} {'MAPE %':>14} {'Kendall tau':>16} {'RMSE ms':>14} {'lowered by a shard more %':>26} {'training s':>11}")
    for name, rows in results.items():
        cells = [(np.mean(v), np.std(v)) for v in zip(*((r.mape, r.tau, r.rmse_ms, r.lowered, r.train_s) for r in rows),
                                                      strict=True)]
        (mape, mape_sd), (tau, tau_sd), (rmse, rmse_sd), (lowered, _), (seconds, _) = cells
        print(f"{name:22} {mape:7.2f} ± {mape_sd:4.2f} {tau:8.4f} ± {tau_sd:.4f} {rmse:7.3f} ± {rmse_sd:4.2f} {lowered:26.2f} "
              f"{seconds:11.1f}")


if __name__ == "__main__":
    main()
