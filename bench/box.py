"""Exchanges among ranks on several hosts: a cluster in a box (shardcore/measure/hosts.py), whose hosts and
links are emulated. Processes, gloo and TCP are real.

    python -m bench.box exchanges --out DIR     # measure; a rerun goes on where the last one ended
    python -m bench.box judge --out DIR         # the law, fitted to some shapes and asked for others
    python -m bench.box shuffles --times 20     # whether shuffled ranks are found

`judge` compares predictions of exchanges that nothing was fitted to. The law is fitted to KNOWN shapes; rates
of links between hosts are scaled where the bandwidth is another. The explicit link model knows bandwidths and
latency only. `twice` says how far two measurements of the same exchange differ.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from shardcore import report
from shardcore.cost import collective_fit, collective_model
from shardcore.cost.metrics import mape
from shardcore.draws import different
from shardcore.draws.collectives import comm_request
from shardcore.layouts import Channel
from shardcore.measure import collectives, hosts, pairs
from shardcore.measurements import CollectiveRequest, CollectiveSample
from shardcore.samples import dataset
from shardcore.topology import Device, Topology
from shardcore.types import COLLECTIVES, Setting

BATCH = 480
"""Divisible by all numbers of ranks here."""
KNOWN = tuple(hosts.BoxConfig(*shape) for shape in ((2, 2, 400), (4, 2, 400), (2, 4, 400), (3, 2, 400)))
UNKNOWN = tuple(hosts.BoxConfig(*shape) for shape in ((4, 4, 400), (8, 2, 400), (5, 3, 400), (4, 2, 200),
                                                      (4, 2, 800)))
AGAIN = 12
"""Exchanges of each shape that are measured twice."""


def setting(box: hosts.BoxConfig) -> Setting:
    """Its name says what is emulated, wherever a figure of it stands."""
    return Setting(f"emulated-hosts-{box.link_mbit}mbit", BATCH)


def folder(out: Path, box: hosts.BoxConfig) -> Path:
    return out / f"{box.hosts}x{box.ranks_per_host}-{box.link_mbit}mbit"


def drawn(box: hosts.BoxConfig, n: int) -> list[CollectiveRequest]:
    """Draws of FP32, of every collective about as often."""
    draws = (r for _, r in different(lambda i: comm_request(i, box.ranks, BATCH, 3, hosts=box.hosts),
                                     lambda r: dataset.comm_id(setting(box), r), 60 * n)
             if r.payload == "fp32")
    of: dict[str, list[CollectiveRequest]] = {c: [] for c in COLLECTIVES}
    for request in draws:
        if len(of[request.collective]) < -(-n // len(of)):
            of[request.collective].append(request)
    return [r for some in itertools.zip_longest(*of.values()) for r in some if r][:n]


def measure(out: Path, boxes: Iterable[hosts.BoxConfig], n: int) -> None:
    """Measure what is missing, and the first AGAIN of each shape again in a folder of their own."""
    for box in boxes:
        wanted = drawn(box, n)
        for place, requests in ((folder(out, box), wanted), (folder(out / "again", box), wanted[:AGAIN])):
            known = dataset.read_ids(place, "comm") if place.exists() else set()
            missing = [r for r in requests if dataset.comm_id(setting(box), r) not in known]
            if not missing:
                continue
            began, kept = time.monotonic(), []
            with hosts.box(box) as on:
                for sample in collectives.measure_all(missing, box.ranks, setting(box), on=on):
                    kept.append(sample)
                    if len(kept) == 10:
                        dataset.write_comm(place, kept)
                        kept = []
            if kept:
                dataset.write_comm(place, kept)
            print(f"{box.words}: {len(missing)} exchanges in {time.monotonic() - began:.0f} s",
                  file=sys.stderr, flush=True)


def read(out: Path, box: hosts.BoxConfig) -> list[CollectiveSample]:
    return collective_fit.priced([s for s in dataset.read_comm(folder(out, box)) if not s.error])


def scaled(rates: dict[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
    """The law for links between hosts of another bandwidth: `share` of that which it was fitted to."""
    found = {name: law.copy() for name, law in rates.items()}
    for name, law in found.items():
        if name != collective_model.BUCKETIZE:
            law[collective_model.FAR] /= share
    return found


def explicit_ms(samples: Sequence[CollectiveSample], box: hosts.BoxConfig, way: str,
                latency_ms: float) -> np.ndarray:
    """What bandwidths and latency alone make us expect. Within a host, links are as good as infinite."""
    gbps = box.link_mbit / 8e3 / box.ranks_per_host
    devices = (Device(1 << 30, host=f"host-{rank // box.ranks_per_host}") for rank in range(box.ranks))
    topology = Topology(tuple(devices), within_host_gbps=100.0, between_hosts_gbps=gbps,
                        latency_ms=latency_ms)
    found = [collective_model.collective_ms({}, Channel(s.request.collective), collective_fit.owned_bytes(s),
                                            topology)[way == "backward"] for s in samples]
    return np.concatenate(found)


def measured_ms(samples: Sequence[CollectiveSample], way: str) -> np.ndarray:
    return np.array([x.median_ms for s in samples for x in getattr(s, way)])


def judge(out: Path, latency_ms: float) -> None:
    known = [s for box in KNOWN for s in read(out, box)]
    rates = collective_fit.fit(known, known, lambda *_: None)
    kinds = [(c, way) for c, ways in COLLECTIVES.items() for way in ways]
    rows, all_errors = [], {}
    for box in (*KNOWN, *UNKNOWN):
        samples = read(out, box)
        own = scaled(rates, box.link_mbit / KNOWN[0].link_mbit)
        for c, way in kinds:
            of = [s for s in samples if s.request.collective == c]
            if not of:
                continue
            predicted, took = collective_fit.predicted(own, of, way)
            law, explicit = mape(predicted, took), mape(explicit_ms(of, box, way, latency_ms), took)
            known_here = "fitted" if box in KNOWN else "asked"
            all_errors.setdefault((known_here, c, way), []).append((law, explicit, len(of)))
            rows.append((box.words, known_here, f"{c} {way}", str(len(of)), f"{law:.1f}", f"{explicit:.1f}"))
    print(report.text_table(
        ("box", "shape", "collective", "exchanges", "law, error %", "links given, error %"), rows))
    print()
    twice = repeatability(out)
    print(report.text_table(("shapes", "collective", "law, error %", "links given, error %", "twice, %"), [
        (where, f"{c} {way}", *(f"{np.average([x[k] for x in found], weights=[x[2] for x in found]):.1f}"
                                for k in (0, 1)), f"{twice.get((c, way), float('nan')):.1f}")
        for (where, c, way), found in sorted(all_errors.items())]))
    asked = [x for (where, *_), found in all_errors.items() if where == "asked" for x in found]
    print("\nasked, mean of all: " + ", ".join(
        f"{name} {np.average([x[k] for x in asked], weights=[x[2] for x in asked]):.1f}%"
        for k, name in ((0, "law"), (1, "links given"))))


def repeatability(out: Path) -> dict[tuple[str, str], float]:
    """Median of how far two measurements of an exchange differ, in percent of their mean, by collective."""
    apart: dict[tuple[str, str], list[float]] = {}
    for box in (*KNOWN, *UNKNOWN):
        place = folder(out / "again", box)
        again = {s.id: s for s in dataset.read_comm(place)} if place.exists() else {}
        for s in read(out, box):
            for way in COLLECTIVES[s.request.collective] if s.id in again else ():
                a, b = (np.mean(measured_ms([x], way)) for x in (s, again[s.id]))
                apart.setdefault((s.request.collective, way), []).append(200 * abs(a - b) / (a + b))
    return {kind: float(np.median(found)) for kind, found in apart.items()}


def shuffles(times: int, seed: int) -> None:
    """Ranks of a gang shuffled over hosts: whether times of pairs tell the hosts."""
    found = 0
    shapes = [hosts.BoxConfig(*shape) for shape in ((2, 4, 400), (4, 2, 1000), (3, 3, 200), (2, 2, 2000))]
    for k in range(times):
        box = shapes[k % len(shapes)]
        dealt = np.random.default_rng([seed, k]).permutation(box.ranks)
        with hosts.box(box) as on:
            where = [hosts.host_of_rank(int(place), on, box.ranks) for place in dealt]
            near = pairs.measure(box.ranks, pairs.PairConfig(), on=where)
        truth: dict[str, list[int]] = {}
        for rank, host in enumerate(where):
            truth.setdefault(host.address, []).append(rank)
        right = near.levels == [tuple(map(tuple, truth.values()))]
        found += right
        outcome = "found" if right else f"{near.levels} instead of {list(truth.values())}"
        print(f"{k}: {box.words}: {outcome}; "
              f"{near.links.within_gbps or 0:.3f} and {near.links.between_gbps or 0:.4f} GB/s a rank, "
              f"{near.links.latency_ms:.1f} ms", flush=True)
    print(f"hosts found in {found} of {times} shuffles")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.box", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["exchanges", "judge", "shuffles"])
    parser.add_argument("--out", type=Path, help="folder of the exchanges")
    parser.add_argument("--n", type=int, default=48, help="exchanges of each shape (48)")
    parser.add_argument("--latency-ms", type=float, default=1.0, help="given to the explicit link model (1)")
    parser.add_argument("--times", type=int, default=20, help="shuffles (20)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "shuffles":
        shuffles(args.times, args.seed)
    elif args.out is None:
        parser.error("--out is needed")
    elif args.what == "exchanges":
        measure(args.out, (*KNOWN, *UNKNOWN), args.n)
    else:
        judge(args.out, args.latency_ms)


if __name__ == "__main__":
    main()
