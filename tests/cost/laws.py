"""Samples labelled by known laws of cost."""

import math
from functools import cache

import numpy as np

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.step_cost import PARTS
from shardcore.core.types import Setting, Shard, Table
from shardcore.cost import collective_model, features, fit
from shardcore.cost.collective_model import EXCHANGE_TERMS
from shardcore.cost.model import price
from shardcore.cost.neural import NeuralModel
from shardcore.io import dataset
from shardcore.io.measurements import (
    CollectiveRequest,
    CollectiveSample,
    ComputeRequest,
    ComputeSample,
    StepSample,
    TimingSpread,
)
from shardcore.step import access
from shardcore.step.collectives import COLLECTIVES

SETTING = Setting("law", 256)
COLD = Reuse((0.8, 0.15, 0.05) + (0.0,) * 14, 256)
WIDTHS = (4, 8, 16, 32, 64)


def pool(n: int = 24) -> list[Table]:
    rng = np.random.default_rng(0)
    return [
        Table(
            f"t{i}",
            int(10 ** rng.uniform(2.5, 5)),
            int(rng.choice(WIDTHS)),
            round(float(rng.lognormal(1, 1)), 2),
            COLD if i % 2 else Zipf(0.9),
        )
        for i in range(n)
    ]


def linear_law(shards, batch: int) -> tuple[float, float]:
    """A launch, lookups, cells and unique rows, each at its rate."""
    forward, backward = 0.05, 0.03
    for s in shards:
        lookups = s.table.pooling * access.access_share(s) * batch
        forward += 2e-6 * batch + 1e-5 * lookups + 1e-7 * lookups * s.width
        backward += (
            2e-5 * lookups
            + 4e-5 * access.unique_rows(s, batch)
            + 1e-6 * access.unique_rows(s, batch) * s.width
        )
    return forward, backward


def cache_law(shards, batch: int) -> tuple[float, float]:
    """linear_law with lookups that cost up to four times as much where a table outgrows a cache of 256 KiB."""
    forward, backward = linear_law((), batch)
    for s in shards:
        slower = 1 + 3 / (1 + math.exp(-math.log(s.bytes / 2**18)))
        one = linear_law((s,), batch)
        forward, backward = forward + slower * (one[0] - 0.05), backward + slower * (one[1] - 0.03)
    return forward, backward


def spread(ms: float) -> TimingSpread:
    return TimingSpread(ms, ms, ms, 3)


def compute_samples(law, n: int = 240, setting: Setting = SETTING, noise: float = 0.0) -> list[ComputeSample]:
    return list(_drawn_compute(law, n, setting, noise))


@cache
def _drawn_compute(law, n: int, setting: Setting, noise: float) -> list[ComputeSample]:
    rng, tables, samples = np.random.default_rng(1), pool(), []
    for _ in range(n):
        batch = int(rng.choice([64, 256]))
        shards = []
        for _ in range(rng.integers(1, 9)):
            table = tables[rng.integers(len(tables))]
            hi = table.rows if rng.random() < 0.8 else table.rows // 2
            shards.append(Shard(table, 0, hi, 0, int(rng.choice([w for w in WIDTHS if w <= table.dim]))))
        request = ComputeRequest(tuple(shards), batch)
        forward, backward = (ms * math.exp(noise * rng.normal()) for ms in law(shards, batch))
        samples.append(
            ComputeSample(
                dataset.compute_id(setting, request), setting, request, spread(forward), spread(backward), 0.0
            )
        )
    return samples


def exchange_law(widths, batch: int, skew_ms: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """ms per rank: 0.1, 0.02 a peer, 1 GB/s for the busiest, and for what goes out and in 4 GB/s forward and
    2 GB/s backward; forward 0.05 a ms of skew, up to 10 of them."""
    owned = np.array(widths) * batch * 4.0
    n = len(owned)
    out, into = owned * (n - 1) / n, (owned.sum() - owned) / n
    base = 0.1 + 0.02 * (n - 1) + max(out.max(), into.max()) / 1e6
    return base + (out + into) / 4e6 + 0.05 * min(skew_ms, 10), base + (out + into) / 2e6


def ring_law(collective: str, widths, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """ms per rank: 0.2 a round, 0.5 GB/s for a reduce-scatter, 1 GB/s for an all-gather; an all-reduce is
    both, at once."""
    n = len(widths)
    moved = max(widths) * batch * 4.0 * (n - 1) / n
    scatter, gather = 0.2 * (n - 1) + moved / 0.5e6, 0.2 * (n - 1) + moved / 1e6
    return np.full(n, scatter), np.full(n, gather if collective == "reduce_scatter" else scatter + gather)


def bucketize_law(widths, batch: int) -> float:
    """ms to put ids in buckets: 0.3, and 4 GB/s of a rank's own bytes."""
    return 0.3 + sum(widths) * batch * 4.0 / len(widths) / 4e6


def comm_samples(
    n: int = 60, ranks=(2, 3, 4), setting: Setting = SETTING, collective: str = "all_to_all", **request
) -> list[CollectiveSample]:
    """request: further fields of the CommRequests."""
    return list(_drawn_comm(n, ranks, setting, collective, **request))


@cache
def _drawn_comm(n: int, ranks, setting: Setting, collective: str, **request) -> list[CollectiveSample]:
    rng, samples = np.random.default_rng(2), []
    for i in range(n):
        d = ranks[i % len(ranks)]
        widths = tuple(int(w) * 4 for w in rng.integers(0, 200, d))
        if collective == "all_reduce":
            widths = (max(widths),) * d
        if collective == "all_to_all_ids_bucketized":
            widths = tuple(w + 4 for w in widths)
        if sum(widths):
            start_ms = (0.0,) * (d - 1) + (float(2 * (i % 8)),)
            asked = CollectiveRequest(widths, 252, start_ms, collective, **request)
            law = (
                exchange_law(widths, 252, max(start_ms))
                if collective.startswith("all_to_all")
                else ring_law(collective, widths, 252)
            )
            if collective == "all_to_all_ids_bucketized":
                law = (law[0] + bucketize_law(widths, 252), law[1])
            forward, backward = (
                tuple(map(spread, ms)) if direction in COLLECTIVES[collective].directions else None
                for direction, ms in zip(("forward", "backward"), law, strict=True)
            )
            samples.append(
                CollectiveSample(
                    dataset.collective_id(setting, asked), setting, asked, forward, backward, (0.0,) * d, 0.0
                )
            )
    return samples


@cache
def trained() -> NeuralModel:
    """A model of few groups of the linear law, for tests that need any. It is trained once in a process."""
    return fit.train(
        compute_samples(linear_law, 60), comm_samples(20), SETTING, fit.FitConfig(epochs=1)
    ).model


def by_hand(**weights) -> NeuralModel:
    """A model whose costs can be worked out by hand: an op 0.4 + 0.1 ms, a shard 1 + 2 ms, a lookup 1 + 3 µs,
    without correction and contention; a measurement stays below ms × exp(level - 0.5) with probability
    `level`. weights: others than these."""
    k, c = len(features.DRIVERS), len(features.CONDITIONS)
    rates = np.zeros((k, 2))
    rates[features.DRIVERS.index("shards")], rates[features.DRIVERS.index("lookups")] = (
        (1.0, 2.0),
        (0.001, 0.003),
    )
    return NeuralModel(
        SETTING,
        {
            "launch": np.array([0.4, 0.1]),
            "rates": rates,
            "load_typical": np.ones(k),
            "contention.0.weight": np.zeros((k, 1)),
            "contention.0.bias": np.zeros(1),
            "contention.1.weight": np.zeros((1, 2)),
            "condition_low": np.full(c, -9.0),
            "condition_high": np.full(c, 30.0),
            "condition_mean": np.zeros(c),
            "condition_sd": np.ones(c),
            "network.0.weight": np.zeros((c, 2)),
            "network.0.bias": np.zeros(2),
            "band.log_ms": np.zeros(1),
            "band.width": np.array([0.1]),
            "band.level": np.array([0.005, 0.995]),
            "band.error": np.array([-4.95, 4.95]),
            **weights,
        },
        {"ranges": {}},
    )


def collective_ms(
    w, channel, owned, topology, payloads=collective_model.FP32
) -> tuple[np.ndarray, np.ndarray]:
    """[..., D] ms of a channel under weights of exchanges, forward and backward. owned: [..., D] bytes."""
    terms = collective_model.channel_terms(w, channel, topology, payloads)
    ms = terms.transfer_ms_by_direction(owned, np.zeros(owned.shape[:-1]))
    return ms["forward"], ms["backward"]


def of_terms(**rates: float) -> np.ndarray:
    """[E] rates of exchange terms by name. 0 for the others."""
    return np.array([rates.get(name, 0.0) for name in EXCHANGE_TERMS])


def replayed_as_priced(model):
    """A function that replays workloads: each takes what the model says, exactly."""

    def run(workloads) -> list[StepSample]:
        costs = [price(w, model) for w in workloads]
        once = {"step": TimingSpread(1.0, 1.0, 1.0, 9), "oversubscribed": False}
        return [StepSample(**{part: getattr(c, part) for part in PARTS}, **once) for c in costs]

    return run
