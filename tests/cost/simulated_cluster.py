"""SIMULATED exchanges of a cluster whose laws are known and of another form than the model's.

Ranks have a port each way, hosts an uplink each way that their ranks share. The messages of an all-to-all
flow all at once, at max-min fair rates that change whenever one is done (Bertsekas and Gallager 1992, 6.5.2).
Rings go in rounds; a long message shakes hands first; headers take a share; a few percent are noise.

Shapes: D ranks, M messages, L links.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.core.types import OUTPUT_BYTES, Setting
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveRequest, CollectiveSample, TimingSpread
from shardcore.measure.sampling.collectives import draw_collective_request
from shardcore.step.collectives import COLLECTIVES

KNOWN = ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2))
UNKNOWN = (
    (3, 1),
    (6, 1),
    (12, 1),
    (16, 1),
    (32, 1),
    (6, 2),
    (12, 2),
    (16, 2),
    (6, 3),
    (12, 3),
    (16, 4),
    (32, 4),
    (32, 8),
)
"""(ranks, hosts) to train on, and to test on: numbers of ranks that training does not have."""
BATCH = 96 * 16
SIMULATED = Setting("simulated", BATCH)


@dataclass(frozen=True)
class Cluster:
    """The laws. port_gbps: of a rank, each way. uplink_gbps: of a host, each way, for what its ranks exchange
    with other hosts. near_ms, far_ms: latency of a link within and between hosts. post_ms: a rank posts its
    messages one after the other. Messages above eager_bytes wait for a handshake. payload: the share of the
    bandwidth that headers leave. reduce_gbps: at which a rank adds. wake_ms: who waits for long takes up its
    work so much later. noise: relative, of each rank's time."""

    port_gbps: float = 8.0
    uplink_gbps: float = 5.0
    near_ms: float = 0.01
    far_ms: float = 0.04
    post_ms: float = 0.004
    eager_bytes: int = 1 << 13
    payload: float = 0.93
    reduce_gbps: float = 20.0
    wake_ms: float = 0.15
    noise: float = 0.03


def simulate(cluster: Cluster, request: CollectiveRequest, rng: np.random.Generator) -> CollectiveSample:
    """One exchange as a cluster would do it."""
    n, per_host = len(request.widths), len(request.widths) // request.hosts
    owned = np.array(request.widths, dtype=float) * request.batch * OUTPUT_BYTES
    host = np.arange(n) // per_host
    wake_ms = cluster.wake_ms * (1 - math.exp(-(max(request.start_ms) - min(request.start_ms)) / 3))
    if request.collective == "all_to_all":
        sizes = np.tile(owned[:, None] / n, (1, n))
        forward, backward = (
            _all_to_all_ms(cluster, sizes, host) + wake_ms,
            _all_to_all_ms(cluster, sizes.T, host),
        )
    elif request.definition.ids:
        # How much will be sent, lengths, and ids. An eighth of the bytes are lengths.
        received = np.tile(owned[None] / n, (n, 1))
        three = (np.full((n, n), 16.0), received / 8, received * 7 / 8)
        forward, backward = sum(_all_to_all_ms(cluster, x, host) for x in three) + wake_ms, None
        if (work := request.definition.work) and work.buckets:
            forward = forward + owned.mean() / (cluster.reduce_gbps * 1e6)
    else:
        scatter, gather = (_ring_ms(cluster, owned.max() / n, host, adds) for adds in (True, False))
        both = request.collective == "all_reduce"
        forward, backward = (
            (None, np.full(n, scatter + gather + wake_ms))
            if both
            else (np.full(n, scatter + wake_ms), np.full(n, gather))
        )

    def spreads(ms: np.ndarray | None) -> tuple[TimingSpread, ...] | None:
        return (
            None
            if ms is None
            else tuple(
                TimingSpread(x, x, x, 1) for x in (ms * np.exp(cluster.noise * rng.normal(size=n))).tolist()
            )
        )

    return CollectiveSample(
        dataset.collective_id(SIMULATED, request),
        SIMULATED,
        request,
        spreads(forward),
        spreads(backward),
        (0.0,) * n,
        0.0,
    )


def _all_to_all_ms(cluster: Cluster, sizes: np.ndarray, host: np.ndarray) -> np.ndarray:
    """[D] ms until a rank has sent and received all its messages, of sizes [D, D] bytes from and to."""
    n = len(host)
    source, target = (i.ravel() for i in np.nonzero(~np.eye(n, dtype=bool)))
    size, far = sizes[source, target], host[source] != host[target]
    posted = ((target - source) % n) * cluster.post_ms  # in the order of the ring
    done = posted + _latency_ms(cluster, size, far) + _flow_ms(cluster, size, source, target, host)
    ends = np.zeros(n)
    np.maximum.at(ends, source, done)
    np.maximum.at(ends, target, done)
    return ends


def _ring_ms(cluster: Cluster, chunk: float, host: np.ndarray, adds: bool) -> float:
    """ms of a ring's D - 1 rounds, in each of which all ranks pass on a chunk at once."""
    source = np.arange(len(host))
    target, size = np.roll(source, -1), np.full(len(host), chunk)
    moved = _latency_ms(cluster, size, host[source] != host[target]) + _flow_ms(
        cluster, size, source, target, host
    )
    return (len(host) - 1) * float(moved.max() + cluster.post_ms + adds * chunk / (cluster.reduce_gbps * 1e6))


def _latency_ms(cluster: Cluster, size: np.ndarray, far: np.ndarray) -> np.ndarray:
    once = np.where(far, cluster.far_ms, cluster.near_ms)
    return np.where(size > cluster.eager_bytes, 3 * once, once)


def _flow_ms(
    cluster: Cluster, size: np.ndarray, source: np.ndarray, target: np.ndarray, host: np.ndarray
) -> np.ndarray:
    """[M] ms until each message has passed, all starting together at max-min fair rates."""
    ranks, hosts = np.arange(len(host)), np.unique(host)
    far = (host[source] != host[target])[:, None]
    uses = np.concatenate(
        [
            source[:, None] == ranks,
            target[:, None] == ranks,
            far & (host[source][:, None] == hosts),
            far & (host[target][:, None] == hosts),
        ],
        1,
    ).astype(float)  # [M, L]
    capacity = (
        np.repeat([cluster.port_gbps, cluster.uplink_gbps], [2 * len(ranks), 2 * len(hosts)])
        * cluster.payload
        * 1e6
    )
    left, done, now = size.astype(float), np.zeros(len(size)), 0.0
    while (going := left > 1e-6 * size.max()).any():
        rates = _max_min(uses[going], capacity)
        step = float((left[going] / rates).min())
        now, left[going] = now + step, left[going] - step * rates
        done[going] = now
    return done


def _max_min(uses: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """[M] max-min fair rates of messages over links [M, L] of capacity [L]: the most crowded link shares
    itself evenly, then the next with what is left."""
    rates, free, open_ = np.zeros(len(uses)), capacity.copy(), np.ones(len(uses), dtype=bool)
    while open_.any():
        users = open_ @ uses
        share = np.divide(free, users, out=np.full(len(free), np.inf), where=users > 0.5)
        link = int(share.argmin())
        fixed = open_ & (uses[:, link] > 0)
        rates[fixed], open_ = share[link], open_ & ~fixed
        free = np.maximum(free - share[link] * (fixed @ uses), 0.0)
    return rates


def simulated(
    cluster: Cluster,
    shapes: Iterable[tuple[int, int]],
    n: int,
    seed: int,
    collectives: Sequence[str] = tuple(COLLECTIVES),
) -> list[CollectiveSample]:
    """n exchanges of each (ranks, hosts), of the collectives in turn, at batches of different sizes."""
    found = []
    for ranks, hosts in shapes:
        rng = np.random.default_rng([seed, ranks, hosts])
        for index, collective in zip(range(n), itertools.cycle(collectives), strict=False):
            drawn = draw_collective_request(index, ranks, BATCH, seed, hosts=hosts)
            widths = drawn.widths if collective != "all_reduce" else (max(drawn.widths),) * ranks
            if (work := COLLECTIVES[collective].work) and work.buckets:
                widths = tuple(max(1, w) for w in widths)
            request = dataclasses.replace(
                drawn,
                widths=widths,
                batch=BATCH // int(rng.choice([1, 1, 4])),
                collective=collective,
                payload="fp32",
            )
            found.append(simulate(cluster, request, rng))
    return found
