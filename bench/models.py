"""The compute model against NeuroShard's published network: same samples, same splits, one run.

    python -m bench.models datasets/cpu-amd-epyc --seeds 5

NeuroShard (MLSys 2023): 20 features a table (rows, dim, pooling, 17 reuse bins; here standardised) -> 128 -> 32, summed over
the group, -> 64 -> 1, to ms; mean squared error, Adam 1e-3, batch 512, 1,000 epochs, the epoch with the best validation error
kept. `physical rates` is our model before its correction is learned. Only groups at the setting's own batch count, for
NeuroShard's features do not tell the batch. Errors are of forward + backward, in percent:

  error           on the test split by sample; `beyond floor` is √(error² - floor²), the floor being the mean difference of two
                  timings of a group over √2
  planned         on those of its groups that come from sharders' plans; `random` on the others
  unseen tables   on groups of held-out tables alone, by models trained on groups without any of them
  lowered         additions of a random measured shard to a test group that lower the predicted cost, of 10,000

Shapes: S groups, N shards, F features.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch

from shardcore import dataset, report, sampling, streams, tables
from shardcore.cost import accuracy, fit
from shardcore.cost.metrics import kendall_tau
from shardcore.cost.model import group_costs
from shardcore.types import ComputeRequest, ComputeSample, Reuse, Setting, Shard, ShardCoreError, Table

Predict = Callable[[Sequence[ComputeRequest]], np.ndarray]
ADDITIONS = 10_000


@dataclass(frozen=True)
class Result:
    error: float
    tau: float
    beyond_floor: float
    planned: float
    random: float
    unseen: float
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


def error(predict: Predict, samples: Sequence[ComputeSample]) -> float:
    if not samples:
        return float("nan")
    return 100 * float(np.mean(np.abs(predict([s.request for s in samples]) / total_ms(samples) - 1)))


def lowered(predict: Predict, test: Sequence[ComputeSample], seed: int) -> float:
    rng = np.random.default_rng(seed)
    shards = [s for x in test for s in x.request.shards]
    before = [test[i].request for i in rng.integers(0, len(test), ADDITIONS)]
    after = [ComputeRequest((*r.shards, shards[rng.integers(len(shards))]), r.batch) for r in before]
    return 100 * float(np.mean(predict(after) < predict(before)))


def ours(compute: Sequence[ComputeSample], config: fit.FitConfig) -> Predict:
    model = fit.train(compute, [], compute[0].setting, config).model
    return lambda requests: np.array([group_costs([r.shards], model, r.batch)[0] for r in requests])


def neuroshards(compute: Sequence[ComputeSample], seed: int, epochs: int) -> Predict:
    sides = {side: [s for s in compute if accuracy.split_of(s.id) == side] for side in ("train", "validation")}
    return train_neuroshard(sides["train"], sides["validation"], seed, epochs)


def planned_ids(pool: Sequence[Table], setting: Setting, draws: int, seeds: Sequence[int], arena_bytes: int) -> set[str]:
    """Ids of the draws that are a device's op in a sharder's plan."""
    config = sampling.GroupConfig(max_shard_bytes=arena_bytes)
    live = [t for t in pool if t.pooling > 0]
    return {dataset.compute_id(setting, sampling.compute_request(live, i, setting, seed, config)) for seed in seeds
            for i in range(draws) if np.random.default_rng([1, seed, i]).random() < config.planned}


def repeatability(repeats: Sequence[Sequence[ComputeSample]]) -> float:
    """The mean absolute error in percent that a timing has against the truth, from the two best known timings of each group of
    the repeatability set (timed three to eight times: not what was disturbed and then timed once more, nor the control)."""
    pairs = [sorted(g, key=lambda s: s.known_to)[:2] for g in repeats if 3 <= len(g) <= 8]
    return 100 * float(np.mean([abs(b.total_ms / a.total_ms - 1) for a, b in pairs])) / math.sqrt(2) if pairs else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="folder of measurements of one setting")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of initial weights and order (1)")
    parser.add_argument("--epochs", type=int, default=1000, help="of NeuroShard's network (1000)")
    parser.add_argument("--draws", type=int, default=5100, help="of each seed that the dataset measured (5100)")
    parser.add_argument("--draw-seeds", type=int, nargs="*", default=[0, 1], help="that the dataset measured (0 1)")
    parser.add_argument("--arena-gib", type=float, default=4, help="with which it was measured (4)")
    args = parser.parse_args()
    settings = dataset.settings(args.dataset)
    if len(settings) != 1:
        raise ShardCoreError(f"{args.dataset} holds samples of [{'; '.join(map(str, settings))}]; this bench needs one setting")
    compute = [s for s in dataset.read_compute(args.dataset, settings[0])
               if s.error is None and s.request.batch == settings[0].batch]
    floor = repeatability(dataset.read_repeats(args.dataset, settings[0]))
    from_plans = planned_ids(tables.generate_pool(), settings[0], args.draws, args.draw_seeds, int(args.arena_gib * 2**30))
    test = accuracy.held_out(compute)
    planned, rest = ([s for s in test if (s.id in from_plans) == side] for side in (True, False))
    unseen = [s for s in compute if all(sampling.held_out(x.table) for x in s.request.shards)]
    seen = [s for s in compute if not any(sampling.held_out(x.table) for x in s.request.shards)]
    torch.set_num_threads(1)
    models: dict[str, Callable[[Sequence[ComputeSample], int], Predict]] = {
        "NeuroShard's network": lambda known, seed: neuroshards(known, seed, args.epochs),
        "physical rates": lambda known, seed: ours(known, fit.FitConfig(seed=seed, epochs=1, learning_rate=1e-12)),
        "ShardCore": lambda known, seed: ours(known, fit.FitConfig(seed=seed)),
    }
    results: dict[str, list[Result]] = {name: [] for name in models}
    for seed, (name, train) in itertools.product(range(args.seeds), models.items()):
        began = time.perf_counter()
        predict, train_s = train(compute, seed), time.perf_counter() - began
        whole, tau = error(predict, test), kendall_tau(predict([s.request for s in test]), total_ms(test))
        results[name].append(Result(whole, tau, math.sqrt(max(0.0, whole**2 - floor**2)), error(predict, planned),
                                    error(predict, rest), error(train(seen, seed), unseen), lowered(predict, test, seed),
                                    train_s))
        print(f"seed {seed}, {name}: {whole:.2f}%", file=sys.stderr)
    print(f"{settings[0]}: {len(compute)} groups, {len(test)} of them held out, {len(planned)} of those from plans; unseen "
          f"tables: {len(unseen)} groups, by models of {len(seen)}; {args.seeds} seeds\nrepeatability (floor): {floor:.2f}%\n")
    rows = [(name, *(f"{np.mean(v):.3f} ± {np.std(v):.3f}" for v in zip(*map(astuple, found), strict=True)))
            for name, found in results.items()]
    print(report.text_table(("model", *(f.name.replace("_", " ") for f in fields(Result))), rows))


if __name__ == "__main__":
    main()
