"""Exchanges among ranks on several hosts: a cluster in a box (bench/hosts.py), whose hosts and
links are emulated. Processes, gloo and TCP are real.

    sudo python -m bench.box measure DIR --exchanges 60 --hosts H --ranks-per-host R \\
        --between-gbit-s RATE [--pods P --pod-gbit-s RATE]   # each shape; the same into AGAIN
    python -m bench.box judge DIR ... --again AGAIN    # the law, fitted to some shapes and asked for others

`judge` compares predictions of exchanges that nothing was fitted to: of the last rank of each, for which a
step waits. The law is fitted to shapes in KNOWN at the lowest rate. Rates of links between hosts are scaled
where the bandwidth is another. The explicit link model knows bandwidths and latency only: each rank has a
share of its host's link, or all share it. `twice` says how far two measurements of the same exchange differ.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from bench import common, hosts
from shardcore import report
from shardcore.core.links import host_names, make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting
from shardcore.cost import collective_fit, collective_model
from shardcore.cost.metrics import mape
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveRequest, CollectiveSample, EmulatedLinks
from shardcore.measure import collectives, hardware
from shardcore.measure.sampling import distinct_requests
from shardcore.measure.sampling.collectives import draw_collective_request
from shardcore.measure.sampling.problems import DIMS
from shardcore.measure.transport import Transport
from shardcore.stages import measure as run
from shardcore.step.collectives import COLLECTIVES
from shardcore.step.kinds import Channel
from shardcore.step.scopes import CROSS, CROSS_POD, HOST, POD, SCOPES, WORLD, groups_among_hosts

KNOWN = {(2, 4, 1), (4, 8, 1), (2, 8, 1), (8, 16, 1), (16, 16, 1), (4, 4, 2), (4, 8, 2)}
"""Hosts, ranks and pods that the law is fitted to, at the lowest rate there is."""
_EVEN = 0.25
"""Share of draws over emulated hosts with equal loads on all ranks, as in plans of good searches. Links that are
equally busy reach a lower rate than one link that is busier than the others."""
_OF_PODS = {HOST: POD, CROSS: CROSS_POD}
"""Scopes of pods that take the place of scopes of hosts."""
_IN_PODS = 0.5
"""Share of draws over hosts in pods in which a scope of hosts becomes one of pods."""
SMALL_BYTES = 100 << 10
WITHIN_GBPS = 0.5
"""Given to the explicit link model for links within a host: loopback among ranks that share cores."""
Shape = tuple[int, int, int, EmulatedLinks]
"""Hosts, ranks, pods, and links."""


def read_exchanges(
    folders: Sequence[Path], groups: Collection[str] = (WORLD,)
) -> dict[Shape, list[CollectiveSample]]:
    """Read exchanges on emulated hosts in FP32 among groups of some kinds, by shape."""
    found: dict[Shape, list[CollectiveSample]] = defaultdict(list)
    samples = [s for folder in folders for s in dataset.read_collective_samples(folder) if not s.error]
    for s in collective_fit.priceable_samples(samples):
        r = s.request
        if r.emulated is not None and r.group in groups and r.payload == "fp32":
            found[r.hosts, len(r.widths), r.pods, r.emulated].append(s)
    return dict(sorted(found.items(), key=lambda item: (item[0][2], *item[0][:2], item[0][3].between_gbit_s)))


def scale_link_rates(rates: dict[str, np.ndarray], fraction: float) -> dict[str, np.ndarray]:
    """Exchange rates for links between hosts of `fraction` times the fitted bandwidth."""
    found = {name: law.copy() for name, law in rates.items()}
    for name, law in found.items():
        if name not in collective_model.OWN_WORK:
            law[collective_model.FAR] /= fraction
    return found


def topologies_of_links(shape: Shape, latency_ms: float) -> tuple[Topology, Topology]:
    """Topologies with explicit links: a share of the host's link for each rank, and a link shared by ranks."""
    n_hosts, ranks, pods, links = shape
    devices = tuple(Device(1 << 30, host=name) for name in host_names(ranks, n_hosts, pods))
    own, shared = {"within_host": WITHIN_GBPS}, {"within_host": WITHIN_GBPS}
    domains = {"between_hosts": (n_hosts if pods == 1 else pods, links.between_gbit_s)}
    for level, (n_domains, gbit_s) in (
        domains | ({"within_pod": (n_hosts, links.pod_gbit_s)} if pods > 1 else {})
    ).items():
        shared[level] = gbit_s / 8
        own[level] = shared[level] / (ranks // n_domains)
    return tuple(
        Topology(devices, links=make_links(latency_ms, given is shared, **given)) for given in (own, shared)
    )


def measured_ms(samples: Sequence[CollectiveSample], direction: str) -> np.ndarray:
    """[S] measured ms of each exchange's last rank."""
    return np.array([max(x.median_ms for x in getattr(s, direction)) for s in samples])


def is_small_ring(sample: CollectiveSample) -> bool:
    """Tell if an exchange is a ring of few bytes, whose time is latency of its rounds."""
    return sample.request.definition.ring and bool(collective_fit.rank_bytes(sample).max() < SMALL_BYTES)


def print_errors(folders: Sequence[Path], again: Sequence[Path], latency_ms: float) -> None:
    by_shape = read_exchanges(folders)
    known = [s for shape, samples in by_shape.items() if shape[:3] in KNOWN for s in samples]
    slowest = min(shape[3].between_gbit_s for shape in by_shape)
    known = [s for s in known if s.request.emulated.between_gbit_s == slowest]
    rates = collective_fit.fit_exchange_rates(known)
    twice = repeat_differences(by_shape, read_exchanges(again))
    rows, of_kind = [], defaultdict(list)
    for shape, samples in by_shape.items():
        gbit_s = shape[3].between_gbit_s
        own = scale_link_rates(rates, gbit_s / slowest)
        where = "fitted" if shape[:3] in KNOWN and gbit_s == slowest else "asked"
        for (c, row), small in itertools.product(COLLECTIVES.items(), (False, True)):
            of = [s for s in samples if s.request.collective == c and is_small_ring(s) == small]
            for direction in row.directions if of else ():
                what = f"{c} {direction}{', small' * small}"
                predicted, took = collective_fit.predicted_and_measured_ms(own, of, direction)
                errors = (
                    mape(predicted, took),
                    # Of each exchange's last rank, by the explicit link model. Nothing was fitted.
                    *(
                        mape(
                            np.array(
                                [
                                    collective_model.channel_terms({}, Channel(c), on)
                                    .transfer_ms_by_direction(collective_fit.rank_bytes(s), np.zeros(()))[
                                        direction
                                    ]
                                    .max()
                                    for s in of
                                ]
                            ),
                            took,
                        )
                        for on in topologies_of_links(shape, latency_ms)
                    ),
                )
                of_kind[where, what].append((*errors, len(of)))
                rows.append(
                    (
                        f"{shape[0]} x {shape[1] // shape[0]}, "
                        f"{shape[3].description.partition(' hosts')[2].strip(', ')}",
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
                    *(f"{_weighted_mean_error(found, k):.1f}" for k in range(3)),
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
                f"\n{where}, all: law {_weighted_mean_error(found, 0):.1f}%, shares of links given "
                f"{_weighted_mean_error(found, 1):.1f}%, shared links given {_weighted_mean_error(found, 2):.1f}%"
            )


def _weighted_mean_error(found: Sequence[tuple[float, ...]], k: int) -> float:
    """Mean of the error in column k, weighted by number of exchanges."""
    return float(np.average([x[k] for x in found], weights=[x[-1] for x in found]))


def repeat_differences(
    first: dict[Shape, list[CollectiveSample]], second: dict[Shape, list[CollectiveSample]]
) -> dict[str, float]:
    """Median difference of repeated measurements of an exchange, in percent of their mean, by collective."""
    again = {s.id: s for samples in second.values() for s in samples}
    apart: dict[str, list[float]] = defaultdict(list)
    for s in (s for samples in first.values() for s in samples if s.id in again):
        for direction in s.request.definition.directions:
            a, b = (measured_ms([x], direction)[0] for x in (s, again[s.id]))
            apart[f"{s.request.collective} {direction}{', small' * is_small_ring(s)}"].append(
                200 * abs(a - b) / (a + b)
            )
    return {kind: float(np.median(found)) for kind, found in apart.items()}


# --- exchanges are measured ---------------------------------------------------------------------------------


def emulated_request(
    index: int, ranks_on: tuple[int, int], batch: int, links: EmulatedLinks, seed: int = 0
) -> CollectiveRequest:
    """Draw collective `index` among the ranks of emulated hosts.

    Some are within a host or across hosts, and some have equal loads. No rank computes before the collective,
    as all share this machine's cores.

    ranks_on: number of hosts, and ranks of each.
    """
    n_hosts, ranks = ranks_on[0], ranks_on[0] * ranks_on[1]
    request = replace(
        draw_collective_request(index, ranks, batch, seed, hosts=n_hosts), busy_ms=0.0, emulated=links
    )

    def uniform_draw(stream: int) -> float:
        return np.random.default_rng([stream, seed, index, ranks]).random()

    if uniform_draw(9) < _EVEN:
        request = replace(request, widths=(max(1, round(np.mean(request.widths))),) * ranks)
    group, domains = request.definition.draw.scope, n_hosts
    if links.pods > 1 and uniform_draw(11) < _IN_PODS:
        group, domains = _OF_PODS.get(group, ""), links.pods
    # Without a scope, or with one rank in each domain, the collective is among all ranks.
    if not group or domains == ranks or uniform_draw(7) >= request.definition.draw.scope_share:
        return request
    # What travels across domains is the rows that a reduce-scatter within domains leaves to each rank.
    batch = request.batch // (ranks // domains) if SCOPES[group].across else request.batch
    members = groups_among_hosts(request.host_names, group)
    # A group without bytes would not run its collective, so one of its ranks gets the least width.
    idle = [ranks[0] for ranks in members if not any(request.widths[r] for r in ranks)]
    widths = tuple(min(DIMS) if r in idle else w for r, w in enumerate(request.widths))
    return replace(request, widths=widths, group=group, batch=batch)


def measure_exchanges(out: Path, box: hosts.Box, n: int, batch: int, seed: int) -> None:
    """Measure the first n exchanges over emulated hosts' links, except exchanges in the dataset."""
    setting = Setting(hardware.hardware_name("cpu"), batch)

    def draw(i: int) -> CollectiveRequest:
        return emulated_request(i, (box.hosts, box.ranks_per_host), batch, box.links, seed)

    wanted = distinct_requests(draw, lambda request: dataset.collective_id(setting, request), n)
    missing = list(run.requests_to_measure(wanted, dataset.read_timed_ids(out, "comm")))
    config = collectives.CollectiveConfig()
    # Ranks share cores, also while they start.
    config = replace(config, timeout_s=config.timeout_s * math.ceil(box.ranks / (os.cpu_count() or 1)))
    if missing:
        with hosts.emulated_hosts(box) as places:
            transport = Transport(places=places)
            samples = collectives.measure_collectives(missing, box.ranks, setting, config, transport)
            for sample in samples:
                dataset.write_collective_samples(out, [sample])
                common.print_progress(sample.request.collective)
    dataset.merge_parts(out)
    print(
        f"{len(missing)} of {n} exchanges measured among {box.ranks} ranks of {box.hosts} {box.links.description}"
    )


def main() -> None:
    parser = common.bench_parser(__doc__)
    commands = parser.add_subparsers(required=True, dest="what")
    p = commands.add_parser("judge")
    p.add_argument("folders", type=Path, nargs="+", help="datasets of emulated exchanges")
    p.add_argument("--again", type=Path, nargs="+", default=(), help="datasets of the same, measured again")
    p.add_argument("--latency-ms", type=float, default=2.0, help="given to the explicit link model (2)")
    p = commands.add_parser("measure", description=hosts.Box.__doc__, formatter_class=parser.formatter_class)
    p.add_argument("out", type=Path, help="dataset, which only grows")
    for name, default in (("exchanges", 60), ("batch", 512), ("seed", 0)):
        p.add_argument(f"--{name}", type=int, default=default)
    of_box = {field.name: field.default for field in fields(hosts.Box)}
    for name, default in of_box.items():
        kind = int if isinstance(default, int) else float
        p.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    args = parser.parse_args()
    if args.what == "judge":
        print_errors(args.folders, args.again, args.latency_ms)
    else:
        box = hosts.Box(**{name: getattr(args, name) for name in of_box})
        measure_exchanges(args.out, box, args.exchanges, args.batch, args.seed)


if __name__ == "__main__":
    main()
