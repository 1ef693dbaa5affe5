"""Errors of hardware profiles on published measurements that they were not fitted to.

    python -m bench.published                       # errors, from the timings in bench/published_timings.csv
    python -m bench.published --ask OTHER.csv       # errors of the shipped profiles on other timings
    python -m bench.published --write               # fit all profiles to all timings, and write them
    python -m bench.published --reduce RAW.csv...   # make bench/published_timings.csv of tables of timings

Whole sources are either fitted or asked, never rows of one source both. The shipped profiles are fitted to
all. No row leaves without a reason. Qualities are those of the table: A, card and shape stated; B, one of
them inferred; C, more; D, not to be used; M, a trained net's output. A and B are fitted.

Beside each error stands that of the constants of TorchRec's planner (constants.py and planner/constants.py,
1.8.0).
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from statistics import median_high
from tempfile import TemporaryDirectory

import numpy as np

from bench import common, published_plans
from bench.published_cards import (
    NETWORKS,
    SHIPPED,
    card_of_timing,
    fitted_networks,
    fitted_profiles,
    network_of_timing,
    shipped_profile_of_card,
)
from shardcore import report
from shardcore.core.types import PRECISION_BYTES, Table
from shardcore.cost.profile import Network, Profile, load_network, load_profile, write_profile
from shardcore.cost.profile_fit import EXCHANGES, OPS, QUALITIES, Predictor, Timing, read_timings
from shardcore.io import writing

TIMINGS = Path(__file__).parent / "published_timings.csv"
RECORDS = Path(__file__).parents[1] / "shardcore" / "cost"
ASKED = (
    "benchmark_results.json@6ac3d68a",
    "aws-samples/awsome-distributed-training",
    "results_sophia  setup 1",
    "results_sophia  setup 6",
    "results_polaris nccl_2_18 setup 4",
    "pytorch/FBGEMM PR 5712",
)
"""Parts of the names of sources that are asked. All others are fitted."""
JUDGED = (*QUALITIES, "C")
LARGE_BYTES = 32 << 20
HBM_GBPS, UVM_GBPS, CACHE_GBPS, NEAR_GBPS, FAR_GBPS = 963.0, 3.4, 22.0, 644.0, 13.4
"""TorchRec's constants: HBM_MEM_BW, and what caching and UVM get; INTRA_NODE_BANDWIDTH, CROSS_NODE_BANDWIDTH."""


# --- the table of timings -----------------------------------------------------------------------------------

_KEPT = (
    "source,gpu,op,impl,B,T,E,D,L,unique,weights_precision,optimizer,weighted,index_distribution,mode,cached,time_us,"
    "ranks,hosts,interconnect,msg_bytes_per_rank,quality,notes"
).split(",")
_PAIR, _SUM = "bwd kernel, rows hit ", "bwd kernels (CTA + warp)"
_FLAGGED = ", kernels behind a flag"
_CACHED = {
    "cache_load_factor 0.1": "0.1",
    "1/8 of rows": "0.125",
    # The footprint is that of the rows of 100 batches, as the generator of their ids gives them.
    "cache = 1.0 x measured footprint": "0.073",
    "cache = 0.8 x measured footprint": "0.058",
}
"""Share of rows in a cache, by words of a note."""


def reduce_columns(rows: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Published timings, reduced to the needed columns.

    Kernels that make one backward pass are added up. Of the ten runs of an MLPerf system, the median stays.
    Kernels behind a flag are named so, and are no op of the law: users run the default ones.
    """
    made: list[dict[str, str]] = []
    pairs: dict[tuple[str, ...], list[dict[str, str]]] = {}
    steps: dict[str, list[Mapping[str, str]]] = {}
    for raw in rows:
        row = {column: raw.get(column) or "" for column in _KEPT}
        if row["op"] == "allreduce" and raw.get("busbw_GBps") and not row["time_us"]:
            # nccl-tests' PERFORMANCE.md: an all-reduce moves 2 (n - 1) / n of its bytes over the bus.
            passes = 2 * (1 - 1 / int(row["ranks"]))
            row["time_us"] = f"{passes * int(row['msg_bytes_per_rank']) / float(raw['busbw_GBps']) / 1e3:.6g}"
        row["cached"] = next(
            (share for words, share in _CACHED.items() if words in row["notes"]), row["cached"]
        )
        if row["op"] == published_plans.STEP:
            steps.setdefault(row["source"].rsplit("/", 1)[0], []).append(row)
        elif row["op"].startswith(_PAIR):
            pairs.setdefault((row["source"], row["impl"], row["B"], row["D"]), []).append(row)
        else:
            made.append(row)
    for pair in pairs.values():
        both_us = f"{sum(float(row['time_us']) for row in pair):g}"
        made.append(pair[0] | ({"op": _SUM, "time_us": both_us} if len(pair) > 1 else {}))
    for source, runs in steps.items():
        time_us = f"{median_high(float(run['time_us']) for run in runs):g}"
        made.append({**runs[0], "source": source, "time_us": time_us})
    for row in made:
        if "hip_" in row["notes"] and "default kernels" not in row["notes"]:
            row["op"] = f"{row['op'].removesuffix(_FLAGGED)}{_FLAGGED}"
    return made


def write_reduced_timings(raw: Sequence[Path], path: Path = TIMINGS) -> None:
    """Write published timings of several tables, reduced to the needed columns."""
    rows = reduce_columns(
        row for of in raw for row in csv.DictReader(StringIO(of.read_text(encoding="utf-8")))
    )
    writing.write_csv(path, rows)
    common.print_progress(f"{len(rows)} timings of {', '.join(map(str, raw))}")


# --- TorchRec's constants -----------------------------------------------------------------------------------


def _memory(table: Table) -> str:
    """The memory with a table's rows, as torch names it."""
    return ("uvm_caching" if table.load_factor else "uvm") if table.in_host_memory else "device"


def torchrec_planner_us(timing: Timing) -> float:
    """Time in µs that TorchRec's planner predicts for a timing (planner/shard_estimators.py)."""
    if timing.op in EXCHANGES:
        passes = 2 if timing.op == "allreduce" else 1
        gbps = NEAR_GBPS if timing.hosts == 1 else FAR_GBPS
        return passes * timing.sent[0] * (1 - 1 / len(timing.sent)) / gbps / 1e3
    gbps = {"device": HBM_GBPS, "uvm": UVM_GBPS, "uvm_caching": CACHE_GBPS}[_memory(timing.shards[0].table)]
    moved = timing.batch * sum(
        t.pooling * (8 + t.dim * PRECISION_BYTES[t.precision]) + t.dim * 4
        for t in (shard.table for shard in timing.shards)
    )
    # Backward is twice forward.
    return moved / gbps / 1e3 * {"fwd": 1, "bwd": 2, "fwd+bwd": 3}.get(timing.op, 2)


# --- errors -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PredictedTiming:
    """A published timing, with the predictions of hardware profiles.

    card: name of the profile, and of the network if it is another than the profile's.
    part: "fitted", or "asked" for rows that it was not fitted to.
    error: relative, of the prediction. band: that the profile expects. torchrec: error of TorchRec's
      constants.
    """

    timing: Timing
    card: str
    part: str
    error: float
    band: float
    torchrec: float

    @property
    def op_or_size_text(self) -> str:
        """Label of a timing in a report: op and memory of an op, size of a collective."""
        t = self.timing
        return (
            f"collectives, {'32 MiB and more' if t.sent[0] >= LARGE_BYTES else 'smaller'}"
            if t.op in EXCHANGES
            else f"{t.op}, {_memory(t.shards[0].table)}"
        )


def profile_errors(
    made: Mapping[str, Profile],
    networks: Mapping[str, Network],
    timings: Sequence[Timing],
    sources: Sequence[str] = ASKED,
) -> list[PredictedTiming]:
    """Prediction errors of hardware profiles and networks on published timings.

    sources: parts of the names of sources that were not fitted.
    """
    asked, of = [], dict[tuple[str, str | None], list[Timing]]()
    for t in timings:
        if (card := card_of_timing(t) or shipped_profile_of_card(t.gpu)) in made:
            of.setdefault((card, network_of_timing(t, networks)), []).append(t)
    for (card, network), own in of.items():
        profile = made[card].on_network(networks[network]) if network else made[card]
        predictor = Predictor(own)
        bands = profile.error_band(
            lambda many, p=predictor: np.array([p.times_us(values) for values in many])
        )
        for t, us, band in zip(own, predictor.times_us(profile.rate_values), bands, strict=True):
            asked.append(
                PredictedTiming(
                    timing=t,
                    card=f"{card} on {network}" if network else card,
                    part="asked" if any(words in t.source for words in sources) else "fitted",
                    error=float(us / t.time_us - 1),
                    band=float(band),
                    torchrec=torchrec_planner_us(t) / t.time_us - 1,
                )
            )
    return asked


HEADERS = ("", "rows", "mean", "worst", "bias", "in the band", "TorchRec's constants")


def summary_cells(title: str, timings: Sequence[PredictedTiming]) -> tuple[str, ...]:
    """Summary row of prediction errors, with the columns of HEADERS."""
    errors = np.array([a.error for a in timings])
    return (
        title,
        str(len(timings)),
        f"{abs(errors).mean():.1%}",
        f"{abs(errors).max():.0%}",
        f"{errors.mean():+.1%}",
        f"{np.mean([abs(np.log1p(a.error)) <= a.band for a in timings]):.0%}",
        f"{np.mean([abs(a.torchrec) for a in timings]):.0%}",
    )


def summaries_by(
    timings: Iterable[PredictedTiming], *keys: Callable[[PredictedTiming], str]
) -> Iterator[tuple[str, ...]]:
    """Summary rows of prediction errors, one per combination of keys."""
    groups: dict[str, list[PredictedTiming]] = {}
    for a in timings:
        groups.setdefault(" | ".join(key(a) for key in keys), []).append(a)
    for title, group in sorted(groups.items()):
        yield summary_cells(title, group)


def _range_text(values: Sequence[float], edges: Sequence[float]) -> str:
    """Text of the bin, of those between `edges`, in which the values are largest: "from 64", "below 16"."""
    value = max(values)
    low = max((e for e in edges if e <= value), default=None)
    high = min((e for e in edges if e > value), default=None)
    return f"{low or 0:,g} to {high - 1:,g}" if high else f"{low:,g} and more"


RANGES: Mapping[str, Callable[[PredictedTiming], str]] = {
    "batch": lambda a: f"B {_range_text([a.timing.batch], (4096, 65536, 1 << 20))}",
    "width": lambda a: f"D {_range_text([s.width for s in a.timing.shards], (32, 128, 256, 512))}",
    "pooling": lambda a: f"L {_range_text([s.table.pooling for s in a.timing.shards], (2, 16, 32))}",
    "tables": lambda a: f"T {_range_text([len(a.timing.shards)], (2, 8, 16))}",
}


def error_tables(timings: Sequence[PredictedTiming]) -> Iterator[tuple[str, str]]:
    """Titles and Markdown of the tables of prediction errors."""
    good = [a for a in timings if a.timing.quality in QUALITIES]

    def error_table(rows: Iterable[tuple[str, ...]]) -> str:
        return report.markdown_table(HEADERS, list(rows))

    yield (
        "By source",
        error_table(summaries_by(good, lambda a: a.part, lambda a: a.timing.source, lambda a: a.card)),
    )
    yield (
        "By card and op",
        error_table(summaries_by(good, lambda a: a.part, lambda a: a.card, lambda a: a.op_or_size_text)),
    )
    yield (
        "Collectives",
        error_table(
            summaries_by(
                (a for a in good if a.timing.op in EXCHANGES),
                lambda a: a.part,
                lambda a: a.card,
                lambda a: a.timing.op,
                lambda a: f"{a.timing.hosts} x {len(a.timing.sent) // a.timing.hosts}",
                lambda a: a.op_or_size_text.rpartition(", ")[2],
            )
        ),
    )
    ops = [a for a in good if a.timing.op in OPS and _memory(a.timing.shards[0].table) == "device"]
    for name, key in RANGES.items():
        yield (
            f"Ops in device memory by {name}",
            error_table(summaries_by(ops, lambda a: a.part, lambda a: a.card, key)),
        )
    yield (
        "Rows of quality C: not fitted",
        error_table(
            summaries_by(
                (a for a in timings if a.timing.quality == "C"), lambda a: a.card, lambda a: a.op_or_size_text
            )
        ),
    )


def calibration_rows(timings: Sequence[PredictedTiming]) -> Iterator[tuple[str, ...]]:
    """Calibration of bands by class of ops and collectives: share of errors within one band and within the 90% band."""
    groups: dict[str, list[PredictedTiming]] = {}
    for a in timings:
        links = ("between hosts, " if a.timing.hosts > 1 else "within a host, ") * (a.timing.op in EXCHANGES)
        words = links + a.op_or_size_text.removeprefix("collectives, ")
        if a.timing.quality in QUALITIES:
            groups.setdefault(f"{a.part} | {words}", []).append(a)
    for title, some in sorted(groups.items()):
        off = np.array([abs(np.log1p(a.error)) / a.band for a in some])
        mean_band = np.mean([a.band for a in some])
        yield (
            title,
            str(len(some)),
            f"{mean_band:.0%}",
            *(f"{np.mean(off <= most):.0%}" for most in (1, 1.645)),
        )


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        ask=(Path, "another CSV file of published timings"),
        write=(False, "write the profiles"),
    )
    parser.add_argument("--reduce", type=Path, nargs="+", help="CSV files of published timings")
    args = parser.parse_args()
    if args.reduce:
        write_reduced_timings(args.reduce)
        return
    path, folder = TIMINGS, TemporaryDirectory()
    if args.ask:
        path = Path(folder.name) / args.ask.name
        write_reduced_timings([args.ask], path)
    timings, reasons = read_timings(path)
    if args.write:
        made = fitted_profiles(timings)
        for name in SHIPPED:
            write_profile(RECORDS / "profiles" / f"{name}.json", made[name])
        for name, network in fitted_networks(timings, made).items():
            write_profile(RECORDS / "networks" / f"{name}.json", network)
        return
    shipped = {name: load_profile(name) for name in SHIPPED}
    if args.ask:
        asked = profile_errors(shipped, {n: load_network(n) for n in NETWORKS}, timings, sources=("",))
    else:
        common.print_progress("fitting")
        fitted = [t for t in timings if not any(words in t.source for words in ASKED)]
        profiles = fitted_profiles(fitted)
        asked = profile_errors(profiles, fitted_networks(fitted, profiles), timings)
    predicted = {a.timing for a in asked}
    reasons.update(
        f"no profile is of card {t.gpu!r}{f' with links {t.network!r}' if t.network else ''} (quality {t.quality})"
        for t in timings
        if t not in predicted
    )
    judged = [a for a in asked if a.timing.quality in JUDGED]
    reasons.update(f"quality {a.timing.quality}" for a in asked if a not in judged)
    print(
        f"{len(judged)} rows of {args.ask or TIMINGS} are judged, "
        f"{reasons.total()} are left out for the reasons below.\n"
    )
    for title, text in error_tables(judged):
        print(f"## {title}\n\n{text}\n")
    print("## Calibration\n")
    print(
        report.markdown_table(
            ("", "rows", "mean band", "within it (68%)", "within the 90% band"),
            list(calibration_rows(judged)),
        ),
        "\n",
    )
    print("## Rows that are left out\n")
    print(
        report.markdown_table(("reason", "rows"), [(why, str(n)) for why, n in reasons.most_common()]), "\n"
    )
    print(f"## Steps of MLPerf's DLRM-DCNv2\n\n{published_plans.steps_table(path, shipped)}")


if __name__ == "__main__":
    main()
