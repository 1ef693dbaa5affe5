"""Seeded draws: groups of shards, communication loads and steps to measure, and problems to evaluate on.

Draw i depends on (seed, i) alone, so asking for more keeps those that were drawn before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shardcore.memory import shard_bytes
from shardcore.types import (
    MIN_WIDTH,
    MOST_BYTES,
    MOST_DEVICES,
    MOST_DIM,
    MOST_TABLES,
    PRECISION_BYTES,
    CommRequest,
    ComputeRequest,
    Device,
    Infeasible,
    Placement,
    Plan,
    Problem,
    Setting,
    Shard,
    ShardCoreError,
    Table,
    Topology,
    require_within,
)

CONTROL_SEED = 2**32 - 1
"""Kept for the control sample."""
_CONTROL_SHARDS = 8

DEVICES = (2, 4, 8)
"""Numbers of devices of the plans that groups are taken from, and by which a local batch is smaller than the global one."""
REPLICATED_BYTES = 64 << 20
"""Tables larger than this are not worth replicating."""
_PLANNED_SEED = 2**32 - 2
"""Kept for the problems whose plans are measured: `evaluate` never sees them."""
_PLANNED_EVALS = 300

STEP_KINDS = ("columns", "rows", "copies", "columns", "rows", "rows and copies")
"""What the plans of a problem have whose steps are measured: tables whole or cut by columns, and some of these kinds."""
_STEP_SEED = 2**32 - 3
_STEP_TABLES = (8, 24)
_STEP_DIMS = (16, 32, 64, 128)
_COPIED_BYTES = 4 << 20
"""Larger tables are not copied in a step: their gradients would hide what a small exchange takes."""
_DIVIDED = 0.4
"""Share of a step's tables that are divided by rows, in plans that have such."""

MOST_DRAWS, MOST_RANKS = 1_000_000, 1 << 10
"""Of groups, exchanges, steps or problems, all drawn before the first is used; of one exchange, drawn in a second."""
_MOST_SHARDS, _MOST_SLACK = 1 << 16, 1e6
"""Of a group; of a problem's memory over what it needs."""

DIMS = (4, 8, 16, 32, 64, 128)
"""Dims that NeuroShard gives each table of its pool."""

_PLAIN = 0.5
"""Share of exchanges that are all-to-alls in FP32 at the full batch."""
BUSY_MS = 20.0
"""What ranks compute before an exchange: of the order of a step."""
_VARIED = {"all_to_all": 0.2, "reduce_scatter": 0.5, "all_reduce": 0.3}
"""Collectives of the others: what divided rows and copies need is else known from too few samples."""
_FP32 = 0.75
"""Share of these in FP32, which is what the cost model prices."""


Request = TypeVar("Request", ComputeRequest, CommRequest)

PLANNERS = ("random", "size_greedy", "dim_greedy", "lookup_greedy", "size_lookup_greedy", "neuroshard")
"""Sharders whose plans' groups are measured. A fixed list: a new sharder does not change the draws made before."""


@dataclass(frozen=True)
class GroupConfig:
    """Groups of shards. max_shards in one op; max_width of a shard, in columns; max_shard_bytes of a shard's weights;
    any_width: the share of widths drawn from all multiples of 4, evenly on a log scale, rather than the powers of two;
    row_ranges: the share of shards that are a row range; duplicates: the share of shards that are a second copy of one in the
    group; planned: the share of groups that are a device's op in a sharder's plan; replicated: the share of data-parallel ones,
    small tables at a local batch."""

    max_shards: int = 30
    max_width: int = 256
    max_shard_bytes: int = 1 << 30
    any_width: float = 0.25
    row_ranges: float = 0.1
    duplicates: float = 0.02
    planned: float = 0.3
    replicated: float = 0.1

    def __post_init__(self) -> None:
        share = (0, 1)
        require_within(self, "group config", max_shards=(1, _MOST_SHARDS), max_width=(MIN_WIDTH, MOST_DIM),
                       max_shard_bytes=(4 * MIN_WIDTH, MOST_BYTES), any_width=share, row_ranges=share, duplicates=share,
                       planned=share, replicated=(0, 1 - self.planned))


def compute_request(pool: Sequence[Table], index: int, setting: Setting, seed: int = 0,
                    config: GroupConfig | None = None) -> ComputeRequest:
    """Group `index` of a setting: a random one, a data-parallel one, or one of a sharder's plan, as the config has it."""
    config = config or GroupConfig()
    if not pool:
        raise ShardCoreError("the pool has no tables to draw from")
    rng = np.random.default_rng([1, seed, index])
    kind = rng.random()
    if kind < config.planned and (group := _planned_group(tuple(pool), rng, setting, config)):
        return group
    if kind > 1 - config.replicated:
        batch = max(1, setting.batch // int(rng.choice(DEVICES)))
        config = dataclasses.replace(config, row_ranges=0.0, max_shard_bytes=min(config.max_shard_bytes, REPLICATED_BYTES))
    else:
        batch = setting.batch
    return ComputeRequest(_random_group(pool, rng, setting, config), batch)


def _random_group(pool: Sequence[Table], rng: np.random.Generator, setting: Setting, config: GroupConfig) -> tuple[Shard, ...]:
    """1 to max_shards shards, three times in four at most 15, of the pool's tables with replacement at random widths
    (NeuroShard's draw, widened to the shards that a search makes)."""
    shards: list[Shard] = []
    most = min(15, config.max_shards) if rng.random() < 0.75 else config.max_shards
    for _ in range(rng.integers(1, most + 1)):
        if shards and rng.random() < config.duplicates:
            shards.append(shards[rng.integers(len(shards))])
        else:
            table = dataclasses.replace(pool[rng.integers(len(pool))], precision=setting.precision)
            shards.append(_shard(table, rng, config))
    return tuple(shards)


def _planned_group(pool: tuple[Table, ...], rng: np.random.Generator, setting: Setting,
                   config: GroupConfig) -> ComputeRequest | None:
    """An op of a device in a sharder's plan for a problem of the pool, its shards that exceed the config left out; None where
    there is no plan or nothing is left. Sharders see an analytic model: where plans come from matters, not how good they are."""
    from shardcore.cost.analytic import AnalyticModel
    from shardcore.search import SHARDERS, Budget
    from shardcore.workload import lower

    live = sum(t.pooling > 0 for t in pool)
    shape = ProblemConfig(int(rng.choice(DEVICES)), min(10, live), 60, int(rng.choice([32, 64, 128])))
    if setting.batch % shape.devices or not live:
        return None
    drawn = problem(pool, int(rng.integers(1 << 31)), setting, _PLANNED_SEED, shape)
    try:
        plan = SHARDERS[str(rng.choice(PLANNERS))](drawn, AnalyticModel(setting), seed=0, budget=Budget(evals=_PLANNED_EVALS))
    except Infeasible:
        return None
    ops = [op for ops in lower(plan, drawn).ops for op in ops]
    op = ops[rng.integers(len(ops))]
    shards = tuple(s for s in op.shards if s.bytes <= config.max_shard_bytes and s.width <= config.max_width)
    return ComputeRequest(shards[: config.max_shards], op.batch) if shards else None


def control_request(pool: Sequence[Table], setting: Setting, config: GroupConfig | None = None) -> ComputeRequest:
    """The group that runs throughout, so that drift shows: typical shards of the pool, the same for every seed. Large enough to
    be slowed by what slows others."""
    rng = np.random.default_rng([1, CONTROL_SEED])
    config = config or GroupConfig()
    tables = [dataclasses.replace(pool[i], precision=setting.precision) for i in rng.integers(len(pool), size=_CONTROL_SHARDS)]
    return ComputeRequest(tuple(_shard(t, rng, config) for t in tables), setting.batch)


def _shard(table: Table, rng: np.random.Generator, config: GroupConfig) -> Shard:
    lo, hi = 0, table.rows
    if rng.random() < config.row_ranges and table.rows >= 64:
        share = 2.0 ** -rng.uniform(0.5, 4)
        hi = max(1, int(table.rows * share))
        lo = int(rng.integers(0, table.rows - hi + 1))
        hi += lo
    widest = config.max_shard_bytes // ((hi - lo) * PRECISION_BYTES[table.precision]) // MIN_WIDTH * MIN_WIDTH
    widest = max(MIN_WIDTH, min(config.max_width, widest))
    if rng.random() < config.any_width:
        width = min(widest, round((widest / MIN_WIDTH) ** rng.random()) * MIN_WIDTH)
    else:
        width = int(rng.choice([d for d in DIMS if d <= widest]))
    hi = min(hi, lo + max(1, config.max_shard_bytes // (width * PRECISION_BYTES[table.precision])))
    return Shard(dataclasses.replace(table, dim=width), lo, hi, 0, width)


def comm_request(index: int, ranks: int, batch: int, seed: int = 0, max_start_ms: float = 20.0, hosts: int = 1) -> CommRequest:
    """Exchange `index` among ranks on so many hosts.

    Loads: 1 to 30 tables a rank (half the draws log-uniform, for exchanges of plans are small) of random dims, each placed at
    random with probability p, else on the least loaded rank, p uniform, so that the balance varies (NeuroShard); every eighth
    draw leaves some ranks nothing.
    Every other draw has start skews up to max_start_ms. Half are all-to-alls in FP32 at the full batch, what plans of whole and
    column-wise tables do; the rest vary in collective, payload and batch.
    """
    rng = np.random.default_rng([2, seed, index, ranks])
    p, widths = rng.random(), [0] * ranks
    owners = rng.permutation(ranks)[: rng.integers(1, ranks) if rng.random() < 1 / 8 else ranks]
    many = rng.integers(ranks, 30 * ranks + 1)
    for _ in range(many if rng.random() < 0.5 else round(ranks * 30 ** rng.random())):
        rank = rng.choice(owners) if rng.random() < p else min(owners, key=lambda r: widths[r])
        widths[rank] += int(rng.choice(DIMS))
    starts = rng.uniform(0, max_start_ms, ranks) * (index % 2)
    starts -= starts.min()
    collective, payload = "all_to_all", "fp32"
    if rng.random() >= _PLAIN:
        collective, payload = str(rng.choice(list(_VARIED), p=list(_VARIED.values()))), "fp32" if rng.random() < _FP32 else "bf16"
        for _ in range(rng.integers(4)):
            batch = batch // 2 if batch % (2 * ranks) == 0 else batch
    if collective == "all_reduce":
        widths = [max(widths)] * ranks
    return CommRequest(tuple(widths), batch, tuple(round(float(s), 3) for s in starts), collective, payload, hosts, BUSY_MS)


def step_plans(pool: Sequence[Table], index: int, setting: Setting, devices: int, max_table_bytes: int,
               seed: int = 0) -> tuple[Problem, list[tuple[str, Plan]]]:
    """Problem `index` whose steps are measured, with plans of STEP_KINDS and these names. They are random, so loads are uneven
    and every collective runs with many and with few bytes. A problem without tables small enough to copy has fewer plans.

    `devices` divide the batch. Raises ShardCoreError where no table of the pool has lookups and fits max_table_bytes.
    """
    rng = np.random.default_rng([4, seed, index])
    fitting = {dim: step_tables(pool, setting, max_table_bytes, dim) for dim in (MIN_WIDTH, *_STEP_DIMS)}
    if not fitting[MIN_WIDTH]:
        raise ShardCoreError(f"none of the pool's {len(pool)} tables has lookups and fits {max_table_bytes >> 20} MiB at a dim "
                             f"of {MIN_WIDTH}: no step can be replayed; give more memory, or ask for no steps")
    enough = min(_STEP_TABLES[0], len(fitting[MIN_WIDTH]))
    max_dim = int(rng.choice([dim for dim in _STEP_DIMS if len(fitting[dim]) >= enough] or [MIN_WIDTH]))
    fewest, most = (min(n, len(fitting[max_dim])) for n in _STEP_TABLES)
    shape = ProblemConfig(devices, fewest, most, max_dim)
    drawn = problem(fitting[max_dim], int(rng.integers(1 << 31)), setting, _STEP_SEED, shape)
    room = Device(2 * sum(shard_bytes(Shard.whole(t), setting.batch, setting.optimizer) for t in drawn.tables))
    drawn = dataclasses.replace(drawn, name=f"steps-{seed}-{index:02}", topology=Topology((room,) * devices))
    small = [t for t in drawn.tables if t.bytes <= _COPIED_BYTES]
    return drawn, [(kind, _step_plan(drawn, kind, small, rng)) for kind in STEP_KINDS if small or "copies" not in kind]


def step_tables(pool: Sequence[Table], setting: Setting, max_table_bytes: int, dim: int = MIN_WIDTH) -> list[Table]:
    """The pool's tables that have lookups and at this dim are small enough for a step."""
    return [t for t in pool if t.pooling > 0 and t.rows * dim * PRECISION_BYTES[setting.precision] <= max_table_bytes]


def first_step_plans(pool: Sequence[Table], n: int, setting: Setting, devices: int, max_table_bytes: int,
                     seed: int = 0) -> list[tuple[Problem, list[tuple[str, Plan]]]]:
    """The first n plans of step_plans, by their problems."""
    found: list[tuple[Problem, list[tuple[str, Plan]]]] = []
    while (missing := n - sum(len(plans) for _, plans in found)) > 0:
        drawn, plans = step_plans(pool, len(found), setting, devices, max_table_bytes, seed)
        found.append((drawn, plans[:missing]))
    return found


def _step_plan(problem: Problem, kind: str, small: Sequence[Table], rng: np.random.Generator) -> Plan:
    from shardcore.search.pieces import consolidate, divided

    everywhere = tuple(range(len(problem.topology)))
    copied = {small[i].name for i in rng.permutation(len(small))[: rng.integers(1, 4)]} if "copies" in kind else ()
    placements: list[Placement] = []
    for table in problem.tables:
        if table.name in copied:
            placements.append(Placement(Shard.whole(table), everywhere))
        elif "rows" in kind and rng.random() < _DIVIDED and (ranges := divided(table, everywhere)):
            placements += ranges
        else:
            units = table.dim // MIN_WIDTH
            parts = min(units, len(everywhere), int(rng.choice([1, 2, 3], p=[0.6, 0.3, 0.1])))
            cuts = [0, *sorted(rng.choice(np.arange(1, units), parts - 1, replace=False)), units]
            placements += [Placement(Shard(table, 0, table.rows, int(lo) * MIN_WIDTH, int(hi) * MIN_WIDTH), (int(d),))
                           for lo, hi, d in zip(cuts, cuts[1:], rng.choice(everywhere, parts, replace=False), strict=False)]
    return Plan(consolidate(placements))


def different(draw: Callable[[int], Request], identify: Callable[[Request], str], n: int | None) -> Iterator[tuple[str, Request]]:
    """The first n different requests (None: all) that draw(0), draw(1), ... give, and their ids. A tiny pool may not have n."""
    seen: set[str] = set()
    for index in itertools.count():
        if len(seen) == n or index >= 10 * (n or len(seen) + 100):
            return
        request = draw(index)
        key = identify(request)
        if key not in seen:
            seen.add(key)
            yield key, request


@dataclass(frozen=True)
class ProblemConfig:
    """Problems as in NeuroShard's benchmark: min_tables to max_tables at dims up to max_dim on `devices` devices. slack:
    memory of all devices over what the tables need."""

    devices: int = 4
    min_tables: int = 10
    max_tables: int = 60
    max_dim: int = 128
    slack: float = 1.5

    def __post_init__(self) -> None:
        require_within(self, "problem config", devices=(1, MOST_DEVICES), min_tables=(1, MOST_TABLES),
                       max_tables=(self.min_tables, MOST_TABLES), max_dim=(MIN_WIDTH, MOST_DIM), slack=(1, _MOST_SLACK))


def problem(pool: Sequence[Table], index: int, setting: Setting, seed: int = 0, config: ProblemConfig | None = None) -> Problem:
    """Problem `index` of a setting: tables of the pool without replacement, each at a random dim of DIMS."""
    config = config or ProblemConfig()
    live = [t for t in pool if t.pooling > 0]
    if len(live) < config.min_tables:
        raise ShardCoreError(f"the pool has {len(live)} tables with lookups; a problem needs at least {config.min_tables}")
    rng = np.random.default_rng([3, seed, index])
    n = min(int(rng.integers(config.min_tables, config.max_tables + 1)), len(live))
    dims = [d for d in DIMS if d <= config.max_dim]
    tables = tuple(dataclasses.replace(live[i], dim=int(rng.choice(dims)), precision=setting.precision)
                   for i in rng.choice(len(live), n, replace=False))
    need = sum(shard_bytes(Shard.whole(t), setting.batch, setting.optimizer) for t in tables)
    one_column = max(shard_bytes(Shard(t, 0, t.rows, 0, MIN_WIDTH), setting.batch, setting.optimizer) for t in tables)
    topology = Topology((Device(max(int(need * config.slack / config.devices), one_column)),) * config.devices)
    return Problem(f"pool-{seed}-{index:02d}", tables, topology, setting.batch, setting.optimizer)
