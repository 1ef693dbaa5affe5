"""Plans for tables that do not fit in device memory: ours against three ways to share it out, and its law.

    python -m bench.tiers plans --problems 30 --out plans.jsonl
    python -m bench.tiers misses --problems 30 --out misses.jsonl

Run again, a part goes on from there. Nothing is measured: rows in host memory need a GPU.

plans: 12 to 24 tables on 4 H100 (profile nvidia-h100-sxm), half of the problems by power laws, half from the
    calibrated pool, with device memory for 5% to 60% of the weights beside what a step needs. In every third
    one, host memory holds four fifths of the weights. All arms are priced by one model, ours: one LRU cache an
    op, as wide as its widest table. All plans are for the same bytes, and keep to them. Arms:

    ours: `plan --tiers`.
    TorchEasyRec: its dynamic program over HBM and DDR, reimplemented, in TorchRec's planner.
    scale-up: TorchRec's planner with its EmbeddingOffloadScaleupProposer.
    largest to host: until the others fit. Then our search for places.
    ..., our places: the load factors of the first two with our search for places.

    Planners get our bytes, the heat of rows as CacheStatistics, and the bandwidth of the link. Both run with
    several load factors and sharding types; the plan that is cheapest under our model counts.
misses: an op of 1 to 4 tables by power laws with one cache, predicted, and simulated row by row as FBGEMM has
    it: sets of 32 ways, LRU. LFU is simulated too, and not predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer, UniformProposer
from torchrec.distributed.types import CacheStatistics

from bench import common
from bench.common import say
from bench.peers.room import free_bytes
from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Device
from shardcore.core.types import Plan, Problem, Shard, Table
from shardcore.cost.model import CostModel
from shardcore.cost.profile import load_profile
from shardcore.report.text import markdown_table
from shardcore.search import SHARDERS, Budget
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.memory_tiers import MemoryTiers, tier_bytes, tiers_of, with_load_factors
from shardcore.search.state.shards import priced
from shardcore.step import access
from shardcore.step.kinds import WHOLE_ROWS, layout_of_torchrec, run_of
from shardcore.step.memory import fits, host_bytes
from shardcore.step.memory_account import own_peaks
from shardcore.tables import streams
from shardcore.tables.generate import generate_pool
from shardcore.tables.heat import heat_of
from shardcore.tables.host_rows import in_one_cache
from shardcore.torchrec.placements import placements_of
from shardcore.torchrec.planner_pieces import quiet

sys.path.append(str(Path(__file__).parents[1] / "tests" / "tables"))

import lru

Row = dict[str, Any]
PROFILE, DEVICES, BATCH, EVALS = "nvidia-h100-sxm", 4, 16_384, 3_000
SHARES = (0.05, 0.15, 0.3, 0.6)
"""Of the weights, what fits in device memory."""
FACTORS = (0.01, 0.2)
"""Load factors that planners start from, or offer. 0.2 is TorchRec's default."""
TYPES = ("table_wise", "column_wise", "row_wise")
KERNELS = {"fused": 1.0, "fused_uvm": 0.0}
"""Load factors of kernels without a cache."""
LESS = (1.0, 0.97, 0.9, 0.75, 0.5)
"""Shares of the memory that an arm gets, as ours tries them: the best counts."""


# --- plans --------------------------------------------------------------------------------------------------


def drawn(seed: int) -> Problem:
    rng = np.random.default_rng([seed, 29])
    n = int(rng.integers(12, 25))
    if seed % 2:
        pool = [t for t in generate_pool() if t.pooling > 0.01]
        tables = tuple(pool[k] for k in rng.choice(len(pool), n, replace=False))
    else:
        tables = tuple(
            Table(
                f"t{i}",
                int(10 ** rng.uniform(4.5, 7.5)),
                int(rng.choice((32, 64, 128))),
                float(rng.lognormal(1.5, 1.0)),
                Zipf(float(rng.uniform(0.5, 1.3))),
            )
            for i in range(n)
        )
    weights = sum(t.bytes for t in tables)
    topology = load_profile(PROFILE).topology(1, DEVICES, int(weights * (0.8 if seed % 3 == 2 else 2)))
    rich = Problem(
        f"tiers-{seed}", tables, replace(topology, devices=(Device(1 << 40),) * DEVICES), BATCH, "exact_sgd"
    )
    beside = DEVICES * (1 << 40) - tier_bytes(rich)
    memory = int(beside + SHARES[seed % len(SHARES)] * weights) // DEVICES
    return replace(rich, topology=replace(topology, devices=(Device(memory),) * DEVICES))


class Misses(CacheStatistics):
    """The miss ratios of a table's heat."""

    def __init__(self, table: Table, batch: int):
        self.heat = heat_of([table], batch, unseen=True)[0] if access.lookups(table, batch) else None

    def __deepcopy__(self, memo: Any) -> Misses:
        return self

    @property
    def expected_lookups(self) -> float:
        return self.heat.unique_rows if self.heat else 0.0

    def expected_miss_rate(self, clf: float) -> float:
        return (
            float(self.heat.misses(clf * self.heat.table_rows)) / self.expected_lookups if self.heat else 0.0
        )

    @property
    def cacheability(self) -> float:
        return self.expected_miss_rate(0.2)


@dataclass(frozen=True)
class OurStorage:
    """A ShardEstimator with our bytes of each shard, on its device and in its host's memory."""

    problem: Problem
    tables: Mapping[str, Table]

    def estimate(self, sharding_options: list[Any], sharder_data_map: Any = None) -> None:
        from torchrec.distributed.planner.types import Storage

        # TorchRec takes options from sets, whose order varies.
        sharding_options.sort(key=lambda o: (int(o.name[1:]), o.sharding_type, o.compute_kernel))
        bytes_of = own_peaks(self.problem)
        for option in sharding_options:
            factor = KERNELS.get(option.compute_kernel, option.cache_load_factor)
            table = replace(self.tables[option.name], load_factor=1.0 if factor is None else factor)
            layout = layout_of_torchrec(option.sharding_type, self.problem.topology) or WHOLE_ROWS
            for theirs in option.shards:
                (row, column), (rows, columns) = theirs.offset, theirs.size
                ours = Shard(table, row, row + rows, column, column + columns) if rows and columns else None
                theirs.storage = Storage(
                    hbm=bytes_of(run_of(layout.name, table), ours) if ours else 0,
                    ddr=host_bytes(ours, self.problem) if ours else 0,
                )


class DynamicProgram:
    """TorchEasyRec's DynamicProgrammingProposer (tzrec/utils/plan_util.py), in arrays.

    Tables one after another: the least cost of each bin of HBM and DDR, all devices together. It proposes the best of each bin
    of HBM, from the largest on. Costs are sums over shards, as TorchRec estimates them.
    """

    bins = 100, 50
    """Of HBM and DDR for each device, at most 1,024 of each."""

    def load(self, search_space: list[Any], enumerator: Any = None) -> None:
        self.options: dict[str, list[Any]] = {}
        for option in sorted(search_space, key=lambda o: o.total_storage.hbm + o.total_storage.ddr):
            self.options.setdefault(option.fqn, []).append(option)
        self.waiting: list[list[Any]] = [[options[0] for options in self.options.values()]]
        self.is_first = True

    def propose(self) -> list[Any] | None:
        return self.waiting[0] if self.waiting else None

    def feedback(self, storage_constraint: Any = None, **rest: Any) -> None:
        self.waiting.pop(0)
        if self.is_first:
            self.is_first, self.waiting = False, list(self._proposals(storage_constraint))

    def _proposals(self, topology: Any) -> Iterator[list[Any]]:
        hbm, ddr = (
            np.array([getattr(d.storage, x) for d in topology.devices], float) for x in ("hbm", "ddr")
        )
        n_hbm, n_ddr = (min(n * len(hbm), 1024) for n in self.bins)
        size = np.array([max(hbm.sum(), 1) / n_hbm, max(ddr.sum(), 1) / n_ddr])
        cost, used = np.zeros(1), np.zeros((1, 2))
        back: list[tuple[np.ndarray, np.ndarray]] = []
        for options in self.options.values():
            needs = np.array([(o.total_storage.hbm, o.total_storage.ddr) for o in options]) / size
            largest = np.array(
                [[getattr(s.storage, x) for x in ("hbm", "ddr")] for o in options for s in o.shards]
            )
            of = np.repeat(np.arange(len(options)), [len(o.shards) for o in options])
            # HBM is a device's own, DDR a host's: here all devices are on one.
            too_large = np.bincount(of, (largest > (hbm.max(), ddr.sum())).any(1), len(options)) > 0
            costs = np.where(too_large, np.inf, [o.total_perf for o in options])
            after = used[:, None] + needs
            total = (cost[:, None] + costs).ravel()
            cell = (after[..., 0].astype(int) * n_ddr + after[..., 1].astype(int)).ravel()
            may = np.flatnonzero(((after < (n_hbm, n_ddr)).all(-1).ravel()) & np.isfinite(total))
            # The cheapest way to each cell.
            may = may[np.lexsort((total[may], cell[may]))]
            may = may[np.unique(cell[may], return_index=True)[1]]
            back.append(np.divmod(may, len(options)))
            cost, used = total[may], after.reshape(-1, 2)[may]
        level = used[:, 0].astype(int)
        for h in np.unique(level)[::-1]:
            at, chosen = int(min(np.flatnonzero(level == h), key=cost.__getitem__)), []
            for options, (before, option) in zip(
                reversed(self.options.values()), reversed(back), strict=True
            ):
                chosen.append(options[option[at]])
                at = int(before[at])
            yield chosen[::-1]


def planned(
    problem: Problem,
    proposers: Sequence[Any],
    kernels: Sequence[str],
    types: Sequence[str],
    factor: float,
    less: float,
) -> tuple[Problem, list[Any]] | None:
    """The problem with load factors that TorchRec's planner chose, and its placements. None: it has no plan."""
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import PlannerError, Topology
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    names, [memory] = {f"t{i}": table for i, table in enumerate(problem.tables)}, problem.topology.memory
    configs = [
        EmbeddingBagConfig(name=n, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[n])
        for n, t in names.items()
    ]
    topology = Topology(
        DEVICES,
        "cuda",
        hbm_cap=int(less * min(free_bytes(problem))),
        ddr_cap=memory.bytes // DEVICES,
        local_world_size=DEVICES,
        hbm_to_ddr_mem_bw=memory.gbps * 1e6,
    )
    constraints = {
        n: ParameterConstraints(
            sharding_types=list(types),
            compute_kernels=list(kernels),
            pooling_factors=[t.pooling],
            cache_params=CacheParams(CacheAlgorithm.LRU, factor, stats=Misses(t, problem.global_batch)),
        )
        for n, t in names.items()
    }
    estimators: list[Any] = [EmbeddingPerfEstimator(topology, constraints), OurStorage(problem, names)]
    with quiet():
        planner = EmbeddingShardingPlanner(
            topology,
            problem.local_batch,
            EmbeddingEnumerator(topology, problem.local_batch, constraints, estimator=estimators),
            constraints=constraints,
            stats=[],
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
            proposer=list(proposers),
            debug=False,
        )
        module = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        try:
            plan = planner.plan(module, [EmbeddingBagCollectionSharder()]).plan[""]
        except PlannerError:
            return None
    factors = {
        t.name: KERNELS.get(plan[n].compute_kernel)
        or getattr(plan[n].cache_params, "load_factor", None)
        or 0.0
        if plan[n].compute_kernel != "fused_uvm"
        else 0.0
        for n, t in names.items()
    }
    own = with_load_factors(problem, factors)
    return own, placements_of(plan, dict(zip(names, own.tables, strict=True)), problem.topology)


def rival(
    problem: Problem, model: CostModel, proposers: Callable[[], Sequence[Any]], **how: Any
) -> tuple[float, float]:
    """ms of its best plan, and of the best with its load factors and our places. Infinite: there is none."""
    theirs = ours = np.inf
    kernels = how.get("kernels", ("fused_uvm_caching",))
    for types in how.get("types", [[t] for t in TYPES]):
        for factor in FACTORS:
            for less in LESS:
                if not (found := planned(problem, proposers(), kernels, types, factor, less)):
                    continue
                own, placements = found
                try:
                    plan = priced(placements, own, model.for_problem(own))
                # Rows that a type divides unevenly are no plan that TorchRec trains.
                except ShardCoreError:
                    continue
                if fits(plan, own):
                    theirs = min(theirs, plan.provenance["predicted_ms"])
                    ours = min(ours, searched(own, model))
                    break
    return theirs, ours


def searched(problem: Problem, model: CostModel) -> float:
    try:
        plan: Plan = SHARDERS["portfolio"](problem, model.for_problem(problem), budget=Budget(EVALS))
    except Infeasible:
        return np.inf
    return plan.provenance["predicted_ms"]


def largest_to_host(problem: Problem, model: CostModel) -> float:
    """The best of our plans with the largest tables in host memory, for each share of the memory."""
    best, names = np.inf, [t.name for t in sorted(problem.tables, key=lambda t: -t.bytes)]
    several = [with_load_factors(problem, dict.fromkeys(names[:n], 0.0)) for n in range(len(names) + 1)]
    for less in LESS:
        fitting = (p for p in several if sum(t.device_bytes for t in tiers_of(p)) <= less * tier_bytes(p))
        if found := next(fitting, None):
            best = min(best, searched(found, model))
    return best


def plans(seed: int) -> Row:
    problem, model = drawn(seed), load_profile(PROFILE).model()
    ours = decide(problem, model, [MemoryTiers()], SHARDERS["portfolio"], budget=Budget(EVALS))
    program = rival(
        problem,
        model,
        lambda: [DynamicProgram(), UniformProposer()],
        kernels=("fused", "fused_uvm", "fused_uvm_caching"),
        types=[TYPES],
    )
    scale_up = rival(problem, model, lambda: [EmbeddingOffloadScaleupProposer()])
    ms = {
        "ours": ours.ms,
        "TorchEasyRec's dynamic program": program[0],
        "TorchRec's scale-up": scale_up[0],
        "largest to host": largest_to_host(problem, model),
        "TorchEasyRec's, our places": program[1],
        "TorchRec's scale-up, our places": scale_up[1],
    }
    return {
        "share": SHARES[seed % len(SHARES)],
        "tight_host": seed % 3 == 2,
        "ms": {k: v if np.isfinite(v) else None for k, v in ms.items()},
    }


def plans_report(rows: Sequence[Row]) -> str:
    def over(name: str) -> list[str]:
        ratios = [r["ms"][name] / r["ms"]["ours"] for r in rows if r["ms"][name]]
        if not ratios:
            return [name, "no plan", "", "", "0"]
        return [
            name,
            f"{np.median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            str(sum(x < 0.9995 for x in ratios)),
            str(len(ratios)),
        ]

    head = ["arm", "ms over ours, median", "range", "faster than ours", f"plans, of {len(rows)}"]
    return markdown_table(head, [over(name) for name in rows[0]["ms"] if name != "ours"])


# --- misses -------------------------------------------------------------------------------------------------


def misses(seed: int, batches: int = 120, warm: int = 80) -> Row:
    rng = np.random.default_rng([seed, 31])
    tables = [
        Table(
            f"t{i}",
            int(10 ** rng.uniform(3.5, 5)),
            16,
            float(rng.uniform(1, 10)),
            Zipf(float(rng.uniform(0.4, 1.4))),
            load_factor=float(rng.uniform(0.05, 0.5)),
        )
        for i in range(int(rng.integers(1, 5)))
    ]
    size, batch = sum(t.cached(t.rows) for t in tables), 512
    heats = heat_of(tables, batch)
    together = in_one_cache([Shard.whole(t) for t in tables], batch)
    predicted = sum(
        float(h.misses(s.table.cached(h.table_rows))) for h, s in zip(heats, together, strict=True)
    )
    first = np.cumsum([0, *(t.rows for t in tables)])

    def ids(i: int) -> np.ndarray:
        drawn_ids = (streams.stream(t, batch, i)[0] for t in tables)
        return np.concatenate([one + start for one, start in zip(drawn_ids, first[:-1], strict=True)])

    def simulated(policy: str) -> float:
        seen, missed = lru.cache_misses(map(ids, range(batches)), int(first[-1]), size, warm, policy)
        return float(missed.sum() / seen.sum())

    return {
        "tables": len(tables),
        "rows": size,
        "predicted": predicted / sum(h.unique_rows for h in heats),
        "lru": simulated("lru"),
        "lfu": simulated("lfu"),
    }


def misses_report(rows: Sequence[Row]) -> str:
    cells = []
    for name, some in (
        ("1", [r for r in rows if r["tables"] == 1]),
        ("2 to 4", [r for r in rows if r["tables"] > 1]),
    ):
        off = [100 * abs(r["predicted"] - r["lru"]) for r in some] or [np.nan]
        fewer = [100 * (r["lru"] - r["lfu"]) for r in some] or [np.nan]
        within = sum(x <= 1 for x in off)
        cells.append(
            [
                name,
                str(len(some)),
                f"{np.mean(off):.2f}",
                f"{max(off):.2f}",
                str(within),
                f"{np.mean(fewer):.1f}",
            ]
        )
    head = [
        "tables of a cache",
        "caches",
        "mean off, points",
        "most",
        "within 1 point",
        "LFU misses fewer by",
    ]
    return markdown_table(head, cells)


PARTS: Mapping[str, tuple[Callable[[int], Row], Callable[[Sequence[Row]], str]]] = {
    "plans": (plans, plans_report),
    "misses": (misses, misses_report),
}
"""By name: what one drawn problem gives, and the report of all."""


def main() -> None:
    parser = common.parser(
        __doc__,
        {"part": f"one of {', '.join(PARTS)}"},
        problems=(30, "to draw"),
        out=(..., "a line of JSON for each problem"),
    )
    args = parser.parse_args()
    if args.part not in PARTS:
        parser.error(f"part is {args.part!r}; known are {', '.join(PARTS)}")
    take, show = PARTS[args.part]
    rows = common.rows_with(args.out, {"part": args.part})
    for seed in range(len(rows), args.problems):
        rows.append({"part": args.part, "seed": seed, **take(seed)})
        common.write_lines(args.out, rows)
        say(f"{len(rows)} of {args.problems}")
    print(show(rows))


if __name__ == "__main__":
    main()
