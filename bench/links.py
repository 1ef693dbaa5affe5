"""How well the communication model foretells exchanges: measured ones, and simulated ones among more devices
than are here.

    python -m bench.links datasets/cpu-amd-epyc      # measured: rates of the train split, errors on the test
                                                     split
    python -m bench.links --simulate                 # simulated: rates of 2, 4 and 8 ranks, errors on other
                                                     counts of ranks

Errors are of one rank's transfer, in percent. Of measured exchanges also:

  5 folds              the error by cross-validation over all three splits: of some collectives few are held
                       out
  at all-to-all rates  the error were the collective not measured: priced by its terms at the all-to-all's
                       rates
  neighbours' slowdown the error once both sides are brought to that of the eight training exchanges nearest
                       in time: a machine that others use too drifts, and nothing that a plan holds tells by
                       how much
  repeats              the median interquartile range of the repeats within one measurement
  repeatability        the mean error that a timing has against the truth, from exchanges measured twice, if
                       the folder has any

SIMULATED exchanges are no measurements: they come from `Cluster`, whose laws are known and of another form
than the model's. Ranks have a port each way, hosts an uplink each way that their ranks share; the messages of
an all-to-all flow all at once, at max-min fair rates that change whenever one is done (Bertsekas and Gallager
1992, 6.5.2); rings go in rounds; a long message shakes hands first; headers take a share; a few percent are
noise. `mean` is over the rows.

Shapes: D ranks, M messages, L links.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench import common
from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import OUTPUT_BYTES, Setting
from shardcore.cost import accuracy, collective_fit, collective_model, drift_correction
from shardcore.cost.metrics import mape
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveRequest, CollectiveSample, Spread
from shardcore.measure.sampling.collectives import comm_request
from shardcore.step.collectives import COLLECTIVES

# --- measured -----------------------------------------------------------------------------------------------

NEIGHBOURS, FOLDS = 8, 5


def measured_rows(
    comm: Sequence[CollectiveSample], repeats: Sequence[Sequence[CollectiveSample]]
) -> list[tuple[str, ...]]:
    """One row a collective and way."""
    comm = [s for s in collective_fit.priced(comm) if s.error is None]
    train, validation, test = (
        [s for s in comm if accuracy.split_of(s.id) == side] for side in ("train", "validation", "test")
    )
    rates = collective_fit.fit(train, validation, lambda *_: None)
    as_all_to_all = {
        k: v
        for k, v in rates.items()
        if k.startswith(collective_model.weight(collective_model.ALL_TO_ALL, ""))
    }
    slowdown, folds = _slowdown(train, rates), _fold_errors(comm)
    rows = []
    for collective, row in COLLECTIVES.items():
        held_out = [s for s in test if s.request.collective == collective]
        again = [
            g
            for g in repeats
            if g[0].request.collective == collective and len(collective_fit.priced(g)) == len(g)
        ]
        for way in row.ways if held_out else ():
            predicted, found = collective_fit.predicted(rates, held_out, way)
            proxy, _ = collective_fit.predicted(as_all_to_all, held_out, way)
            usual = np.concatenate(
                [[slowdown(s)] * len(collective_fit.observed([s], way)[1]) for s in held_out]
            )
            spread = np.median([(x.q3_ms - x.q1_ms) / x.median_ms for s in held_out for x in getattr(s, way)])
            rows.append(
                (
                    collective,
                    way,
                    str(len(held_out)),
                    f"{mape(predicted, found):.1f}",
                    folds[collective, way],
                    f"{mape(proxy, found):.1f}" if collective != "all_to_all" else "",
                    f"{mape(predicted, found / usual):.1f}",
                    f"{100 * spread:.0f}",
                    _repeatability(again, way),
                )
            )
    return rows


def _fold_errors(comm: Sequence[CollectiveSample]) -> dict[tuple[str, str], str]:
    """Of each collective and way."""
    both: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for k in range(FOLDS):
        rates = collective_fit.fit([s for i, s in enumerate(comm) if i % FOLDS != k], [], lambda *_: None)
        for collective, row in COLLECTIVES.items():
            for way, left_out in (
                (way, [s for s in comm[k::FOLDS] if s.request.collective == collective]) for way in row.ways
            ):
                if left_out:
                    both.setdefault((collective, way), []).append(
                        collective_fit.predicted(rates, left_out, way)
                    )
    return {
        kind: f"{mape(*map(np.concatenate, zip(*parts, strict=True))):.1f}" for kind, parts in both.items()
    }


def _slowdown(
    train: Sequence[CollectiveSample], rates: Mapping[str, np.ndarray]
) -> Callable[[CollectiveSample], float]:
    """A function: how many times as long as usual the training exchanges took that were measured nearest to a
    sample."""

    def slower(sample: CollectiveSample) -> float:
        ratios = [
            math.log(b / a)
            for way in sample.request.row.ways
            for a, b in zip(*collective_fit.predicted(rates, [sample], way), strict=True)
        ]
        return float(np.mean(ratios))

    at, by = np.array([s.measured_at for s in train]), np.array([slower(s) for s in train])
    return lambda sample: math.exp(
        float(np.median(by[np.argsort(abs(at - sample.measured_at))[:NEIGHBOURS]]))
    )


def _repeatability(repeats: Sequence[Sequence[CollectiveSample]], way: str) -> str:
    pairs = [
        (a.median_ms, b.median_ms)
        for first, second, *_ in repeats
        for a, b in zip(getattr(first, way), getattr(second, way), strict=True)
    ]
    return (
        f"{100 * np.mean([abs(b / a - 1) for a, b in pairs]) / math.sqrt(2):.1f}"
        if pairs
        else "none measured twice"
    )


# --- simulated ----------------------------------------------------------------------------------------------

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
    elif request.row.ids:
        # How much will be sent, lengths, and ids. An eighth of the bytes are lengths.
        received = np.tile(owned[None] / n, (n, 1))
        three = (np.full((n, n), 16.0), received / 8, received * 7 / 8)
        forward, backward = sum(_all_to_all_ms(cluster, x, host) for x in three) + wake_ms, None
        if (work := request.row.work) and work.buckets:
            forward = forward + owned.mean() / (cluster.reduce_gbps * 1e6)
    else:
        scatter, gather = (_ring_ms(cluster, owned.max() / n, host, adds) for adds in (True, False))
        both = request.collective == "all_reduce"
        forward, backward = (
            (None, np.full(n, scatter + gather + wake_ms))
            if both
            else (np.full(n, scatter + wake_ms), np.full(n, gather))
        )

    def spreads(ms: np.ndarray | None) -> tuple[Spread, ...] | None:
        return (
            None
            if ms is None
            else tuple(Spread(x, x, x, 1) for x in (ms * np.exp(cluster.noise * rng.normal(size=n))).tolist())
        )

    return CollectiveSample(
        dataset.comm_id(SIMULATED, request),
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
            drawn = comm_request(index, ranks, BATCH, seed, hosts=hosts)
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


def simulated_rows(cluster: Cluster, n: int, seed: int) -> list[tuple[str, ...]]:
    """One row a number of ranks and hosts, and one of all that training did not have."""
    known = simulated(cluster, KNOWN, n, seed)
    rates = collective_fit.fit(known, known, lambda *_: None)
    tests = {shape: simulated(cluster, [shape], n // 2, seed + 1) for shape in (*KNOWN, *UNKNOWN)}
    rows = [
        (
            *map(str, shape),
            "trained on" if shape in KNOWN else "never trained on",
            *(f"{error:.1f}" for error in collective_fit.errors(rates, samples).values()),
        )
        for shape, samples in tests.items()
    ]
    means = [
        np.mean([float(row[k]) for row in rows if row[2] == "never trained on"])
        for k in range(3, len(rows[0]))
    ]
    return [*rows, ("mean", "", "never trained on", *(f"{mean:.1f}" for mean in means))]


# --- command ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = common.parser(
        __doc__,
        simulate=(False, "simulated exchanges (as well)"),
        samples=(90, "simulated exchanges of each number of ranks and hosts"),
        uplink_gbps=(5.0, "simulated: of a host (5; a rank's port has 8)"),
        eager_bytes=(8192, "simulated: longer messages shake hands first"),
        seed=(0, "of the simulation"),
    )
    parser.add_argument("dataset", nargs="?", help="folder of measurements of one setting")
    args = parser.parse_args()
    if not (args.dataset or args.simulate):
        parser.error("give a folder of measurements, --simulate, or both")
    if args.dataset:
        comm = drift_correction.as_in_a_step(dataset.read_comm(args.dataset))
        settings = list({s.setting for s in comm})
        if len(settings) != 1:
            raise ShardCoreError(
                f"{args.dataset} holds exchanges of [{'; '.join(map(str, settings))}]; this needs one setting"
            )
        rows = measured_rows(comm, dataset.read_comm_repeats(args.dataset))
        print(f"{settings[0]}: error in percent on the test split\n")
        print(
            report.text_table(
                (
                    "collective",
                    "way",
                    "held out",
                    "error",
                    "5 folds",
                    "at all-to-all rates",
                    "neighbours' slowdown",
                    "repeats",
                    "repeatability",
                ),
                rows,
            )
        )
    if args.simulate:
        cluster = Cluster(uplink_gbps=args.uplink_gbps, eager_bytes=args.eager_bytes)
        ways = [f"{collective} {way}" for collective, row in COLLECTIVES.items() for way in row.ways]
        table = report.text_table(
            ("ranks", "hosts", "", *ways), simulated_rows(cluster, args.samples, args.seed)
        )
        lines = ["no measurements, known laws: error in percent", str(cluster), *table.splitlines()]
        print("\n".join(f"SIMULATED  {line}" for line in lines))


if __name__ == "__main__":
    main()
