"""Fit a hardware profile to published timings, and scale one to another card's data sheet.

A fit is a maximum of the posterior: rates start from a profile, are held there by its uncertainty, and move
as far as the timings ask for. So a rate that no timing depends on keeps its value, its uncertainty and its
source.

Shapes: R timings, P rates.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np

from shardcore.core.access_statistics import Zipf
from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.errors import ShardCoreError, shorten
from shardcore.core.links import domain_numbers
from shardcore.core.types import Shard, Table
from shardcore.core.validation import (
    MOST_BATCH,
    MOST_BYTES,
    MOST_DEVICES,
    MOST_MS,
    MOST_ROWS,
    Rule,
    number_within,
    require,
    short_repr,
)
from shardcore.cost import profile_law
from shardcore.cost.profile import BETWEEN_HOSTS, HOST_GBPS, NETWORK_RATES, RATES, SPEC, Profile, ProfileRate
from shardcore.cost.profile_law import FAR, MS_PER_US, NEAR, OpWork, Rates
from shardcore.io import schema

OPS: Mapping[str, tuple[str, ...]] = {
    "fwd": ("forward",),
    "bwd": ("backward",),
    "fwd+bwd": ("forward", "backward"),
    "bwd kernels (CTA + warp)": ("kernels",),
}
"""Passes that each op of a timing is the sum of. `kernels`: backward without sorting and launches."""
EXCHANGES = {
    "alltoall": "all_to_all",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
}
"""Collectives by their names in nccl-tests."""
_MODES = ("device", "uvm", "uvm_caching")
"""Memory with an op's rows."""
QUALITIES = ("A", "B")
"""Qualities of timings that are fitted: card and shape stated, or at most one of them inferred."""
_OPTIMIZERS = {"sgd": "exact_sgd", "exact_row_wise_adagrad": "rowwise_adagrad", "adagrad": "exact_adagrad"}
_MOST_TABLES = 1 << 12
"""Tables of an op."""
_BATCHES_SINCE_EMPTY = 100
"""Batches that published timings of caches are means of. The cache is empty before."""
_BYTES_EACH = Rule(
    lambda sent: all(0 <= n_bytes <= MOST_BYTES for n_bytes in sent),
    f"it needs {MOST_BYTES:,} bytes a rank at most",
)
_LEAST_UNCERTAINTY = 0.02
_OF_PEAK = 0.95
"""Most of its data sheet's bandwidth that a card's memory reaches."""
_DENSE_OF_PEAK = 0.45
"""Most of its data sheet's peak that a card's dense parts reach: what MLPerf's A100 does."""
_MEMORY_RATES = ("read_gbps", "stream_gbps", "update_gbps", "dense_gbps")
"""Rates that a card's memory limits."""
_LEAST_SENSITIVITY = 0.01
"""A timing that changes less than by this share of a rate's change does not depend on it."""


# --- timings ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """A published timing of an op or a collective.

    source: source of the measurement. Timings of one source share their errors.
    gpu: the card. "": that of the profile.
    op: a name of OPS or EXCHANGES.
    time_us: time of one call.
    quality: "A" to "D", or "M" for a model's output.
    shards: shards of an op. batch: samples of each.
    unique: distinct rows of a batch, all shards together. 0: as their accesses give it.
    batches_since_empty: batches that a mean over an op's caches is of, from empty ones on. 0: they were warm.
    sent: bytes of each rank of a collective. hosts: number of hosts, with equally many ranks each.
    network: words for its links.
    """

    source: str
    gpu: str
    op: str
    time_us: Annotated[float, number_within(0, MOST_MS / MS_PER_US)]
    quality: str = "A"
    shards: tuple[Shard, ...] = ()
    batch: int = 0
    optimizer: str = "exact_sgd"
    unique: float = 0.0
    batches_since_empty: int = 0
    sent: Annotated[tuple[float, ...], _BYTES_EACH] = ()
    hosts: int = 0
    network: str = ""

    @property
    def repetition_key(self) -> tuple[object, ...]:
        """A key that repeated timings of the same op or collective share. Together they weigh as much as one."""
        return tuple(value for name, value in vars(self).items() if name != "time_us")


class Predictor:
    """Times of timings by the law of profiles, for one set of rates after another."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        self._n = len(timings)
        self._ops: list[tuple[str, OpWork, np.ndarray, np.ndarray]] = []
        self._exchanges: list[tuple[str, np.ndarray, np.ndarray, list[int]]] = []
        works = {i: _work_of_timing(t) for i, t in enumerate(timings) if t.op in OPS}
        for part in profile_law.FLOORS:
            used = [i for i in works if part in OPS[timings[i].op]]
            if used:
                names = [f.name for f in fields(OpWork)]
                joined = {name: np.concatenate([getattr(works[i], name) for i in used]) for name in names}
                starts = np.cumsum([0, *(len(timings[i].shards) for i in used[:-1])])
                self._ops.append((part, OpWork(**joined), starts, np.array(used)))
        runs: dict[tuple[str, int, int], list[int]] = {}
        for i, t in enumerate(timings):
            if t.op in EXCHANGES:
                runs.setdefault((EXCHANGES[t.op], t.hosts, len(t.sent)), []).append(i)
        for (collective, hosts, ranks), used in runs.items():
            domains = domain_numbers([str(h) for h in range(hosts) for _ in range(ranks // hosts)])
            self._exchanges.append((collective, domains, np.array([timings[i].sent for i in used]), used))

    def times_us(self, rates: Rates) -> np.ndarray:
        """[R] predicted time of each timing in us, under the given rates."""
        ms = np.zeros(self._n)
        for part, work, starts, used in self._ops:
            if part == "forward":
                of_shards = profile_law.forward_ms(rates, work)
            else:
                of_shards = profile_law.backward_ms(rates, work, part == "backward")
            ms[used] += np.add.reduceat(of_shards, starts) + profile_law.op_floor_ms(rates, part)
        for collective, domains, sent, used in self._exchanges:
            ms[used] = profile_law.collective_ms(rates, collective, sent, domains)[:, 0]
        return ms / MS_PER_US


def _work_of_timing(timing: Timing) -> OpWork:
    """Work of the shards of a timed op, as its timing states or implies."""
    work = profile_law.shard_work(timing.shards, timing.batch, timing.optimizer)
    changed: dict[str, np.ndarray] = {}
    if timing.unique:
        changed["unique"] = work.unique * timing.unique / work.unique.sum()
    distinct = changed.get("unique", work.unique) * work.width * work.element_bytes
    changed["op_row_bytes"] = np.full(len(timing.shards), distinct.sum())
    if batches := timing.batches_since_empty:
        # Batches since the cache was empty bring rows that no batch had before. A warm cache misses fewer.
        seen = profile_law.shard_work(timing.shards, batches * timing.batch, timing.optimizer).unique
        fetched = seen / batches * 2 * work.width * work.element_bytes
        changed["cache_bytes"] = np.maximum(work.cache_bytes, fetched)
    return replace(work, **changed)


COLUMNS = ("op", "time_us")
"""Columns that a file of timings needs. Others are those of its ops."""
_OP_COLUMNS, _EXCHANGE_COLUMNS = ("B", "E", "D", "L"), ("ranks", "hosts", "msg_bytes_per_rank")


def read_timings(path: str | Path) -> tuple[list[Timing], Counter[str]]:
    """Read timings of ops and collectives from a CSV file, and count the rows left out by reason.

    Columns: op, time_us; of ops B, T, E, D, L, and optionally unique, index_distribution, weights_precision,
    optimizer, weighted, mode, cached; of collectives ranks, hosts, msg_bytes_per_rank; optionally source,
    gpu, quality.

    Raises ShardCoreError naming a column that is missing.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(schema.read_text(path))))
    except csv.Error as error:
        raise ShardCoreError(f"{path} is no CSV file: {error}") from None
    require(bool(rows), f"{path} has no rows; it needs a line of columns, and one for each timing")
    for column in COLUMNS:
        require(column in rows[0], f"{path} lacks the column {column!r}; it needs {', '.join(COLUMNS)}")
    named = {row["op"] for row in rows}
    for known, columns in ((OPS, _OP_COLUMNS), (EXCHANGES, _EXCHANGE_COLUMNS)):
        if some := sorted(named & known.keys()):
            for column in columns:
                require(column in rows[0], f"{path} has {some[0]!r} timings and lacks the column {column!r}")
    timings, reasons = [], Counter[str]()
    for i, row in enumerate(rows):
        what = f"{path}, line {i + 2}"
        made = _parse_timing({k: (v or "").strip() for k, v in row.items() if k}, what)
        if isinstance(made, Timing):
            timings.append(made)
        else:
            reasons[made] += 1
    return timings, reasons


def _parse_timing(row: Mapping[str, str], what: str) -> Timing | str:
    """Parse a row of a CSV file into a timing, or give the reason why it is left out."""
    op = row["op"]
    if op not in OPS and op not in EXCHANGES:
        return f"op {short_repr(op)} is not one of the law's"
    needed = ("time_us", *(_EXCHANGE_COLUMNS if op in EXCHANGES else _OP_COLUMNS))
    if empty := [column for column in needed if not row.get(column)]:
        return f"{empty[0]} is not stated"
    time_us = _parse_number(row, "time_us", what, MOST_MS / MS_PER_US)
    require(time_us > 0, f"{what} has time_us {row['time_us']}; it needs to be above 0")
    common = {
        "source": row.get("source", ""),
        "gpu": row.get("gpu", ""),
        "op": op,
        "time_us": time_us,
        "quality": row.get("quality") or "A",
    }
    if op in EXCHANGES:
        ranks, hosts = (
            int(_parse_number(row, column, what, MOST_DEVICES, 1)) for column in ("ranks", "hosts")
        )
        require(
            ranks % hosts == 0,
            f"{what} has {ranks} ranks on {hosts} hosts; it needs equally many on each",
        )
        if ranks < 2:
            return "one rank exchanges nothing"
        sent = (_parse_number(row, "msg_bytes_per_rank", what, MOST_BYTES),) * ranks
        return Timing(**common, sent=sent, hosts=hosts, network=row.get("interconnect", ""))
    precision = row.get("weights_precision") or "fp32"
    optimizer = _OPTIMIZERS.get(row.get("optimizer", ""), row.get("optimizer") or "exact_sgd")
    mode, tables = (
        row.get("mode") or "device",
        int(_parse_number(row, "T", what, _MOST_TABLES, 1)) if row.get("T") else 1,
    )
    if precision not in ("fp32", "fp16", "bf16"):
        return f"weights are {short_repr(precision)}"
    if optimizer not in OPTIMIZERS or mode not in _MODES:
        return f"optimizer {short_repr(optimizer)} or mode {short_repr(mode)} is not known"
    shapes = [_parse_numbers(row[column]) for column in ("E", "D", "L")]
    if any(len(x) not in (1, tables) for x in shapes) or len(_parse_numbers(row["B"])) != 1:
        return "shapes of its tables are not stated one by one"
    if any(float(width) % 4 for width in shapes[1]):
        return "a width is no multiple of 4"
    cached = _parse_number(row, "cached", what, 1) if row.get("cached") else 0.0
    if mode == "uvm_caching" and not 0 < cached < 1:
        return "the share of rows that its cache holds is not stated"
    accesses = row.get("index_distribution", "")
    alpha = re.search(r"alpha (\d+(?:\.\d+)?)", accesses)
    with schema.prefix_errors(what):
        shards = tuple(
            Shard.whole(
                Table(
                    f"t{i}",
                    int(rows),
                    int(width),
                    pooling,
                    Zipf(float(alpha[1]) if alpha and "uniform" not in accesses else 0.0),
                    precision,
                    weighted=row.get("weighted") == "True",
                    sequence=pooling == 1,
                    load_factor={"uvm": 0.0, "uvm_caching": cached}.get(mode, 1.0),
                )
            )
            # One value for all tables, or one each.
            for i, (rows, width, pooling) in enumerate(
                zip(*(x * tables if len(x) == 1 else x for x in shapes), strict=True)
            )
        )
    return Timing(
        **common,
        shards=shards,
        batch=int(_parse_number(row, "B", what, MOST_BATCH, 1)),
        optimizer=optimizer,
        unique=_parse_number(row, "unique", what, MOST_ROWS) if row.get("unique") else 0.0,
        batches_since_empty=_BATCHES_SINCE_EMPTY * (mode == "uvm_caching"),
    )


def _parse_number(row: Mapping[str, str], column: str, what: str, most: float, least: float = 0) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    require(
        least <= value <= most,
        f"{what} has {column} {short_repr(row[column])}; it needs a number from {least:,} to {most:,.16g}",
    )
    return value


def _parse_numbers(text: str) -> tuple[float, ...]:
    """Parse one number for each table, such as "128", "2,633" or "9x128,3x24". () for any other text.

    At most one number more than an op may have tables: a short text may stand for millions.
    """
    parts = [re.fullmatch(r"(?:(\d{1,4})x)?(\d{1,12}(?:\.\d+)?)", part.strip()) for part in text.split(",")]
    if not all(parts):
        return ()
    return tuple(
        islice((float(part[2]) for part in parts if part for _ in range(int(part[1] or 1))), _MOST_TABLES + 1)
    )


def timings_of_card(timings: Iterable[Timing], profile: Profile) -> list[Timing]:
    """Timings of a profile's GPU that are good enough to fit a profile to."""
    return [
        t
        for t in timings
        if t.quality in QUALITIES
        and (not t.gpu or re.sub(r"[^a-z0-9]+", "-", t.gpu.lower()).strip("-") in profile.name)
    ]


# --- fit ----------------------------------------------------------------------------------------------------


def fit_profile(
    timings: Sequence[Timing], start: Profile, error: float = 0.1, of_network: float = math.inf
) -> Profile:
    """Fit a hardware profile's rates to timings, as a maximum of the posterior around the starting profile.

    error: relative error that the law is expected to have.
    of_network: most of the data sheet's network bandwidth that collectives between hosts may reach. Infinite: the
      network may be another than the data sheet's.

    Uncertainties come from the curvature of the fit and its residuals. That of compute_factor and
    exchange_factor is what the law leaves unexplained.

    Raises ShardCoreError where there are no timings.
    """
    from scipy.optimize import least_squares

    require(len(timings) > 0, f"profile {start.name!r} has no timings to be fitted to; give some of its card")
    fixed = {*SPEC, "compute_factor", "exchange_factor"}
    names = [name for name in RATES if name not in fixed and start.rates[name].uncertainty > 0]
    values = start.rate_values
    measured = np.log([t.time_us for t in timings])
    groups = Counter(t.repetition_key for t in timings)
    weight = np.array([groups[t.repetition_key] ** -0.5 for t in timings])
    predictor = Predictor(timings)
    depends = _rate_elasticities(predictor, values, names)
    moves = np.any(depends > _LEAST_SENSITIVITY, axis=1).tolist()
    names, depends = [name for name, of in zip(names, moves, strict=True) if of], depends[moves]
    prior = np.array([start.rates[name].uncertainty for name in names])

    def log_errors(steps: np.ndarray) -> np.ndarray:
        """[R] logarithms of predicted over measured times."""
        moved = values | {n: values[n] * math.exp(s) for n, s in zip(names, steps, strict=True)}
        return np.log(predictor.times_us(moved)) - measured

    def residuals(steps: np.ndarray) -> np.ndarray:
        # Large errors count by their size, not by its square.
        scaled = weight * log_errors(steps) / error
        robust = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
        return np.concatenate([robust, steps / prior])

    most = [_max_log_step(name, values, of_network) for name in names]
    result = least_squares(residuals, np.zeros(len(names)), bounds=(-np.inf, most))
    left = log_errors(result.x)
    # Residuals beyond the expected error widen all.
    scale = max(1.0, float(np.sqrt(np.mean((weight * left / error) ** 2))))
    spread = scale * np.sqrt(np.diag(np.linalg.inv(result.jac.T @ result.jac)))
    sources = _rate_sources(timings, names, depends)
    rates = dict(start.rates)
    for name, step, width, most in zip(names, result.x, spread, prior, strict=True):
        rates[name] = ProfileRate(
            values[name] * math.exp(step),
            float(np.clip(width, _LEAST_UNCERTAINTY, most)),
            RATES[name][0],
            sources[name],
        )
    for name, known in (("compute_factor", OPS), ("exchange_factor", EXCHANGES)):
        if len(some := left[[t.op in known for t in timings]]):
            unexplained = float(np.sqrt(np.mean(some**2)))
            rates[name] = replace(
                rates[name],
                uncertainty=max(unexplained, error),
                source=f"errors of the fit on {len(some)} timings",
            )
    return replace(start, rates=rates)


def network_rates(
    start: Profile, timings: Sequence[Timing], error: float = 0.1, of_network: float = math.inf
) -> dict[str, ProfileRate]:
    """Rates of a network: all rates between hosts, and the rates within hosts that the fit to timings adjusts.

    start: profile of a card, scaled to the network's data sheet.
    timings: collectives on the network. []: its rates are the data sheet's.
    error, of_network: as in `fit_profile`.
    """
    made = fit_profile(timings, start, error, of_network) if timings else start
    return {
        name: rate
        for name in NETWORK_RATES
        if (rate := made.rates[name]) != start.rates[name] or name in BETWEEN_HOSTS
    }


def _max_log_step(name: str, values: Rates, of_network: float) -> float:
    """The largest increase of a rate's logarithm in a fit: no rate exceeds that of its card's memory or network."""
    if name in _MEMORY_RATES:
        most = _OF_PEAK * values["hbm_gbps"]
    else:
        most = of_network * values["network_gbps"] if name.endswith(f"{FAR}_gbps") else math.inf
    return max(0.01, math.log(most / values[name]))


def _rate_elasticities(predictor: Predictor, values: Rates, names: Sequence[str]) -> np.ndarray:
    """[P, R] elasticity of each timing to each rate: |change of its logarithm| / that of the rate's."""
    base = np.log(predictor.times_us(values))
    moved = ({**values, name: values[name] * 1.1} for name in names)
    return np.array([np.abs(np.log(predictor.times_us(m)) - base) for m in moved]) / math.log(1.1)


def _rate_sources(timings: Sequence[Timing], names: Sequence[str], depends: np.ndarray) -> dict[str, str]:
    """Text for the sources of the timings that depend most on each rate. depends: [P, R]."""
    words = {}
    for name, shares in zip(names, depends, strict=True):
        by_source: Counter[str] = Counter()
        for timing, share in zip(timings, shares, strict=True):
            by_source[timing.source or "timings"] += share * (share > _LEAST_SENSITIVITY)
        (first, _), *others = [(source, share) for source, share in by_source.most_common() if share]
        more = f" and {len(others)} more" if others else ""
        words[name] = f"fitted to {shorten(first, 120)}{more}"
    return words


# --- scaling ------------------------------------------------------------------------------------------------

_SCALES: Mapping[str, Mapping[str, float]] = {
    **{
        name: {"hbm_gbps": 0.6, "sm_ghz": 0.4}
        for name in ("read_gbps", "stream_gbps", "update_gbps", "bucketize_gbps", "order_gbps")
    },
    "dense_gbps": {"hbm_gbps": 1.0},
    "dense_tflops": {"hbm_gbps": 0.5, "peak_tflops": 0.5},
    "repeat_gbps": {"hbm_gbps": 0.3, "sm_ghz": 0.7},
    **{name: {"sm_ghz": -1.0} for name in RATES if name.endswith("_lookup_ns")},
    **{name: {"pcie_gbps": 1.0} for name in HOST_GBPS},
    **{name: {"nvlink_gbps": 1.0} for name in RATES if name.endswith(f"{NEAR}_gbps")},
    **{name: {"network_gbps": 1.0} for name in RATES if name.endswith(f"{FAR}_gbps")},
}
"""Laws by which rates scale: powers of values of SPEC.

Gathers keep memory busy only as far as multiprocessors have loads on their way. So they follow both: an H200
has 43% more bandwidth than an H100, the same multiprocessors, and gathers about 20% faster. Dense parts wait for
memory in some layers and for matrix units in others (docs/decisions/the-step.md).
"""
_SCALED_UNCERTAINTY = 0.12, 0.25
"""Added to a rate that was scaled: always, and for each factor of e."""


def scale_profile(profile: Profile, name: str, **spec: float) -> Profile:
    """Scale a hardware profile to another card by its data sheet.

    profile: profile of the card that it is most like.
    name: name of the new profile.
    spec: values of SPEC that differ, and memory_bytes.

    Rates that follow from none of these keep their values. All are less certain.

    Raises ShardCoreError for a name that SPEC does not have, and a value that is not positive.
    """
    known = (*SPEC, "memory_bytes")
    for key, value in spec.items():
        require(key in known, f"a data sheet has {key!r}; known are {', '.join(known)}")
        require(0 < value < math.inf, f"a data sheet has {key} {value}; it needs to be above 0")
    ratio = {key: spec.get(key, profile.rates[key].value) / profile.rates[key].value for key in SPEC}
    always, each = _SCALED_UNCERTAINTY
    rates = dict(profile.rates)
    for key, rate in profile.rates.items():
        if key in spec:
            rates[key] = replace(rate, value=float(spec[key]), source=f"data sheet of {name}")
        elif key not in SPEC:
            powers = _SCALES.get(key, {})
            more = always + each * sum(abs(p * math.log(ratio[sheet])) for sheet, p in powers.items())
            by = " and ".join(sheet for sheet in powers if ratio[sheet] != 1.0)
            limits = dict.fromkeys(_MEMORY_RATES, _OF_PEAK * rates["hbm_gbps"].value)
            most = {**limits, "dense_tflops": _DENSE_OF_PEAK * rates["peak_tflops"].value}.get(key, math.inf)
            rates[key] = replace(
                rate,
                value=min(
                    most, math.prod((ratio[sheet] ** p for sheet, p in powers.items()), start=rate.value)
                ),
                uncertainty=math.hypot(rate.uncertainty, more),
                source=f"scaled from {profile.name} by {by}" if by else f"as {profile.name}",
            )
    return Profile(name, (), int(spec.get("memory_bytes", profile.memory_bytes)), rates)
