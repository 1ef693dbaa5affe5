"""Exchanges among ranks on several hosts: a cluster in a box (shardcore/measure/hosts.py), whose hosts and
links are emulated. Processes, gloo and TCP are real.

    python -m shardcore measure --device cpu --samples 0 --batch 512 --out DIR --exchanges 60 \\
        --hosts H --ranks R --between-gbit-s RATE [--pods P --pod-gbit-s RATE]   # each shape; the same into AGAIN
    python -m bench.box judge DIR ... --again AGAIN    # the law, fitted to some shapes and asked for others
    python -m bench.box shuffles --times 20            # whether shuffled ranks are found

`judge` compares predictions of exchanges that nothing was fitted to: of the last rank of each, for which a
step waits. The law is fitted to shapes in KNOWN at the lowest rate. Rates of links between hosts are scaled
where the bandwidth is another. The explicit link model knows bandwidths and latency only: each rank has a
share of its host's link, or all share it. `twice` says how far two measurements of the same exchange differ.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from bench import common
from shardcore import report
from shardcore.core.links import host_names, links_of
from shardcore.core.topology import Device, Topology
from shardcore.cost import collective_fit, collective_model
from shardcore.cost.metrics import mape
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveSample, EmulatedLinks
from shardcore.measure import hosts, pairs
from shardcore.step.collectives import COLLECTIVES
from shardcore.step.kinds import Channel
from shardcore.step.scopes import WORLD

KNOWN = {(2, 4, 1), (4, 8, 1), (2, 8, 1), (8, 16, 1), (16, 16, 1), (4, 4, 2), (4, 8, 2)}
"""Hosts, ranks and pods that the law is fitted to, at the lowest rate there is."""
SMALL_BYTES = 100 << 10
WITHIN_GBPS = 0.5
"""Given to the explicit link model for links within a host: loopback among ranks that share cores."""
Shape = tuple[int, int, int, EmulatedLinks]
"""Hosts, ranks, pods, and links."""


def read(folders: Sequence[Path], groups: Collection[str] = (WORLD,)) -> dict[Shape, list[CollectiveSample]]:
    """Emulated exchanges in FP32 among groups of a kind, by shape."""
    found: dict[Shape, list[CollectiveSample]] = defaultdict(list)
    samples = [s for folder in folders for s in dataset.read_comm(folder) if not s.error]
    for s in collective_fit.priced(samples):
        r = s.request
        if r.emulated is not None and r.group in groups and r.payload == "fp32":
            found[r.hosts, len(r.widths), r.pods, r.emulated].append(s)
    return dict(sorted(found.items(), key=lambda item: (item[0][2], *item[0][:2], item[0][3].between_gbit_s)))


def scaled(rates: dict[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
    """The law for links between hosts of another bandwidth: `share` of that which it was fitted to."""
    found = {name: law.copy() for name, law in rates.items()}
    for name, law in found.items():
        if name not in collective_model.OWN_WORK:
            law[collective_model.FAR] /= share
    return found


def topologies(shape: Shape, latency_ms: float) -> tuple[Topology, Topology]:
    """Given bandwidths and latency: a share of its host's link for each rank, or a link that they share."""
    n_hosts, ranks, pods, links = shape
    devices = tuple(Device(1 << 30, host=name) for name in host_names(ranks, n_hosts, pods))
    own, shared = {"within_host": WITHIN_GBPS}, {"within_host": WITHIN_GBPS}
    units = {"between_hosts": (n_hosts if pods == 1 else pods, links.between_gbit_s)}
    for level, (n_units, gbit_s) in (
        units | ({"within_pod": (n_hosts, links.pod_gbit_s)} if pods > 1 else {})
    ).items():
        shared[level] = gbit_s / 8
        own[level] = shared[level] / (ranks // n_units)
    return tuple(
        Topology(devices, links=links_of(latency_ms, given is shared, **given)) for given in (own, shared)
    )


def explicit_ms(samples: Sequence[CollectiveSample], topology: Topology, way: str) -> np.ndarray:
    """[S] ms of each exchange's last rank, by the explicit link model. Nothing was fitted."""
    return np.array(
        [
            collective_model.collective_ms(
                {}, Channel(s.request.collective), collective_fit.owned_bytes(s), topology
            )[way == "backward"].max()
            for s in samples
        ]
    )


def measured_ms(samples: Sequence[CollectiveSample], way: str) -> np.ndarray:
    """[S] measured ms of each exchange's last rank."""
    return np.array([max(x.median_ms for x in getattr(s, way)) for s in samples])


def is_small(sample: CollectiveSample) -> bool:
    """Tell if an exchange is a ring of few bytes, which takes as long as its rounds need to wake ranks up."""
    return sample.request.row.ring and bool(collective_fit.owned_bytes(sample).max() < SMALL_BYTES)


def judge(folders: Sequence[Path], again: Sequence[Path], latency_ms: float) -> None:
    by_shape = read(folders)
    known = [s for shape, samples in by_shape.items() if shape[:3] in KNOWN for s in samples]
    slowest = min(shape[3].between_gbit_s for shape in by_shape)
    known = [s for s in known if s.request.emulated.between_gbit_s == slowest]
    rates = collective_fit.fit(known)
    twice = repeatability(by_shape, read(again))
    rows, of_kind = [], defaultdict(list)
    for shape, samples in by_shape.items():
        gbit_s = shape[3].between_gbit_s
        own = scaled(rates, gbit_s / slowest)
        where = "fitted" if shape[:3] in KNOWN and gbit_s == slowest else "asked"
        for (c, row), small in itertools.product(COLLECTIVES.items(), (False, True)):
            of = [s for s in samples if s.request.collective == c and is_small(s) == small]
            for way in row.ways if of else ():
                what = f"{c} {way}{', small' * small}"
                predicted, took = collective_fit.predicted(own, of, way)
                errors = (
                    mape(predicted, took),
                    *(mape(explicit_ms(of, on, way), took) for on in topologies(shape, latency_ms)),
                )
                of_kind[where, what].append((*errors, len(of)))
                rows.append(
                    (
                        f"{shape[0]} x {shape[1] // shape[0]}, {shape[3].words.partition(' hosts')[2].strip(', ')}",
                        where,
                        what,
                        len(of),
                        *(f"{x:.1f}" for x in errors),
                    )
                )
    heads = ("law, error %", "shares of links given, error %", "shared links given, error %")
    print(report.text_table(("hosts x ranks", "shape", "collective", "exchanges", *heads), rows))
    print()
    print(
        report.text_table(
            ("shapes", "collective", "exchanges", *heads, "twice, %"),
            [
                (
                    where,
                    what,
                    sum(n for *_, n in found),
                    *(f"{_mean(found, k):.1f}" for k in range(3)),
                    f"{twice[what]:.1f}" if what in twice else "-",
                )
                for (where, what), found in sorted(of_kind.items())
            ],
        )
    )
    for where in ("fitted", "asked"):
        found = [x for (of, *_), some in of_kind.items() if of == where for x in some]
        if found:
            print(
                f"\n{where}, all: law {_mean(found, 0):.1f}%, shares of links given "
                f"{_mean(found, 1):.1f}%, shared links given {_mean(found, 2):.1f}%"
            )


def _mean(found: Sequence[tuple[float, ...]], k: int) -> float:
    """The mean of errors number k, by the number of exchanges."""
    return float(np.average([x[k] for x in found], weights=[x[-1] for x in found]))


def repeatability(
    first: dict[Shape, list[CollectiveSample]], second: dict[Shape, list[CollectiveSample]]
) -> dict[str, float]:
    """Median of how far two measurements of an exchange differ, in percent of their mean, by collective."""
    again = {s.id: s for samples in second.values() for s in samples}
    apart: dict[str, list[float]] = defaultdict(list)
    for s in (s for samples in first.values() for s in samples if s.id in again):
        for way in s.request.row.ways:
            a, b = (measured_ms([x], way)[0] for x in (s, again[s.id]))
            apart[f"{s.request.collective} {way}{', small' * is_small(s)}"].append(200 * abs(a - b) / (a + b))
    return {kind: float(np.median(found)) for kind, found in apart.items()}


def shuffles(times: int, seed: int) -> None:
    """Ranks of a gang shuffled over hosts: whether times of pairs tell the hosts."""
    found = 0
    boxes = [hosts.Box(*shape) for shape in ((2, 4, 0.4), (4, 2, 1.0), (3, 3, 0.2), (2, 2, 2.0))]
    for k in range(times):
        box = boxes[k % len(boxes)]
        dealt = np.random.default_rng([seed, k]).permutation(box.ranks)
        with hosts.box_of(box) as places:
            where = [places[i] for i in dealt]
            near = pairs.measure(box.ranks, pairs.PairConfig(), on=where)
        truth: dict[int, list[int]] = defaultdict(list)
        for rank, place in enumerate(where):
            truth[place.host].append(rank)
        right = near.levels == [tuple(map(tuple, truth.values()))]
        found += right
        outcome = "found" if right else f"{near.levels} instead of {list(truth.values())}"
        print(
            f"{k}: {box.hosts} x {box.ranks_per_host}, {box.between_gbit_s:g} Gbit/s: {outcome}; "
            f"{near.links.within_gbps or 0:.3f} and {near.links.outward[0].gbps:.4f} GB/s a rank, "
            f"{near.links.latency_ms:.1f} ms",
            flush=True,
        )
    print(f"hosts found in {found} of {times} shuffles")


def main() -> None:
    parser = common.parser(__doc__)
    commands = parser.add_subparsers(required=True, dest="what")
    p = commands.add_parser("judge")
    p.add_argument("folders", type=Path, nargs="+", help="datasets of emulated exchanges")
    p.add_argument("--again", type=Path, nargs="+", default=(), help="datasets of the same, measured again")
    p.add_argument("--latency-ms", type=float, default=2.0, help="given to the explicit link model (2)")
    p = commands.add_parser("shuffles")
    p.add_argument("--times", type=int, default=20)
    p.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "shuffles":
        shuffles(args.times, args.seed)
    else:
        judge(args.folders, args.again, args.latency_ms)


if __name__ == "__main__":
    main()
