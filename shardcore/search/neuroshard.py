"""NeuroShard's search (MLSys 2023, arXiv 2305.01868): a beam over column cuts around greedy passes.

Inner search: place shards by falling cost, each on the device whose fused cost is lowest.
It respects memory, and a cap on the device's columns: scale × the mean.
One pass is made for each of several scales, and the cheapest plan stays.

Outer search: keep a few states. From each, halve the largest and the costliest shards, one at a time.
Run the inner search on each result, and keep the best few.

Differences to the released code:

- One pass has no cap.
- If no pass fits, states that exceed the memory least come first.
- If none ever fits, a second beam starts from a `packing`.
- States that differ only in the order of their cuts count once.
- Halves that meet on a device count as the one shard that they become.
- Only shards that can be cut take a candidate's place.
- On unequal devices, cost is at the device's speed and includes the shard. On equal ones nothing changes.
- Bundles are placed as one. Pinned tables go first, whatever the cap.

Shapes: C states searched at once, N their shards, K passes, S strips, D devices, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.errors import ShardCoreError
from shardcore.search.budget import Budget, Meter
from shardcore.search.feasible import feasible_shards, pack_or_raise
from shardcore.search.placement_state import PlacementState
from shardcore.search.shard_cost_cache import ShardCostCache, ShardKey
from shardcore.search.shards import bundles, placed, priced, to_plan
from shardcore.types import Plan, Problem

State = tuple[ShardKey, ...]
"""Sorted shards: how tables are cut, but not yet where they go."""

_ROWS_AT_ONCE = 16_384
"""Devices × passes × states in lockstep: as many as a processor handles in about the time of one."""
_CELLS_AT_ONCE = 1 << 26
"""The same × strips. It limits the memory."""
_PROBED = 256
"""Shards that tell how long a search of very many takes."""


@dataclass(frozen=True)
class NeuroShardConfig:
    """Parameters of the beam.

    beam: states kept.
    candidates: shards halved, of the largest and of the costliest.
    steps: cuts at most.
    scales: caps on a device's columns, relative to the mean.
    uncapped: whether one more pass runs without a cap.
    """

    beam: int = 3
    candidates: int = 10
    steps: int = 10
    scales: tuple[float, ...] = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5)
    uncapped: bool = True

    def __post_init__(self) -> None:
        if min(self.beam, self.candidates, len(self.caps)) < 1 or self.steps < 0:
            raise ShardCoreError(f"{self} needs a beam, candidates and passes of 1 or more, "
                                 "and steps of 0 or more")

    @property
    def caps(self) -> tuple[float, ...]:
        """One cap for each pass of an inner search."""
        return (*self.scales, float("inf")) if self.uncapped else tuple(self.scales)


@dataclass(frozen=True)
class _Found:
    """The best plan of a state.

    ms: its cost; infinite if no pass fits.
    state: how tables are cut.
    devices: of each shard; empty if no pass fits.
    over_bytes: by how much the best pass exceeds the memory.
    """

    ms: float
    state: State
    devices: tuple[int, ...]
    over_bytes: int = 0


def neuroshard(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None,
               config: NeuroShardConfig = NeuroShardConfig()) -> Plan:  # noqa: B008 (frozen)
    """The best plan of the beam. Deterministic: the seed is only recorded.

    Where a budget in seconds does not suffice for a first search, it is some plan that fits.

    One evaluation is one greedy pass priced. Raises Infeasible (see `feasible_shards`) and SettingMismatch.
    """
    problem.require_setting(model.setting)
    meter = (budget or Budget()).start()
    shards = feasible_shards(problem)
    cache = ShardCostCache(problem, model, shards)
    state = tuple(sorted(cache.keys(shards)))
    if (search_s := _search_s(cache, state, config, meter)) and not meter.has_time(search_s):
        packing = pack_or_raise(problem)
        return to_plan(packing.shards, packing.devices, problem, model, algorithm="neuroshard", seed=seed,
                       packed=True, evals=0, config=asdict(config))
    before_s = meter.seconds()
    [first] = _search(cache, [state], config)
    state_s = meter.seconds() - before_s
    meter.evals += len(config.caps)
    # A packing may divide rows differently. So it has strips, and a cache, of its own.
    of_packing, packing = (cache, first) if first.devices else _packed(problem, model)
    best = _beam(cache, first, config, meter, state_s)
    if not best.devices:
        cache, best = of_packing, _beam(of_packing, packing, config, meter, state_s)
    elif packing.ms < best.ms:
        cache, best = of_packing, packing
    placements = placed(cache.bundles(best.state), best.devices, problem)
    return priced(placements, problem, model, algorithm="neuroshard", seed=seed,
                  packed=best is packing and packing is not first, evals=meter.evals, config=asdict(config))


def _search_s(cache: ShardCostCache, state: State, config: NeuroShardConfig, meter: Meter) -> float:
    """About the seconds of an inner search, from one of a few of its shards. 0: no budget asks for them."""
    if meter.budget.seconds is None or len(state) < 10 * _PROBED:
        return 0.0
    before_s = meter.seconds()
    _search(cache, [state[:_PROBED]], config)
    return (meter.seconds() - before_s) * len(state) / _PROBED


def _packed(problem: Problem, model: CostModel) -> tuple[ShardCostCache, _Found]:
    """Some plan that fits, with its own cache, as its row ranges may differ. Raises Infeasible."""
    packing = pack_or_raise(problem)
    cache = ShardCostCache(problem, model, packing.shards)
    device_of = dict(zip(packing.shards, packing.devices, strict=True))
    firsts = [bundle[0] for bundle in bundles(packing.shards, problem)]
    pairs = sorted((cache.key(first), device_of[first]) for first in firsts)
    state, devices = tuple(p for p, _ in pairs), tuple(d for _, d in pairs)
    return cache, _Found(cache.plan_ms(state, devices), state, devices)


def _beam(cache: ShardCostCache, start: _Found, config: NeuroShardConfig, meter: Meter,
          state_s: float) -> _Found:
    """The best plan of a beam that starts from the state of `start`, or `start` itself.

    state_s: seconds that one state takes.
    """
    rows = len(config.caps) * len(cache.speed)
    # Chunks bound the memory, and let the budget end a round early.
    chunk = max(1, min(_ROWS_AT_ONCE // rows, _CELLS_AT_ONCE // (rows * len(cache))))
    best, beam = start, [start.state]
    for _ in range(config.steps):
        states = list(dict.fromkeys(s for state in beam for s in _halvings(cache, state, config.candidates)))
        found: list[_Found] = []
        while len(found) < len(states):
            n = meter.affordable(min(chunk, len(states) - len(found)), len(config.caps), state_s)
            if n == 0:
                break
            before_s = meter.seconds()
            found += _search(cache, states[len(found):len(found) + n], config)
            meter.evals += n * len(config.caps)
            state_s = (meter.seconds() - before_s) / n
        beam = [f.state for f in sorted(found, key=lambda f: (f.ms, f.over_bytes))[:config.beam]]
        best = min([best, *found], key=lambda f: f.ms)
        if len(found) < len(states) or not found:
            break
    return best


def _halvings(cache: ShardCostCache, state: State, n: int) -> list[State]:
    """The states with one more cut: of each of the n largest and n costliest shards that can be cut."""
    cache.add(state)
    keys = [key for key in dict.fromkeys(state) if cache.may_split(key)]
    if not keys:
        return []
    numbers = cache.numbers(*np.array(keys).T)
    largest = np.argsort(-cache.bytes[numbers], kind="stable")[:n]
    costliest = np.argsort(-cache.single_ms[numbers], kind="stable")[:n]
    return [_halve(state, keys[i]) for i in sorted({*largest, *costliest})]


def _halve(state: State, key: ShardKey) -> State:
    """The state with this shard in two halves."""
    strip, units = key
    rest = list(state)
    rest.remove(key)
    return tuple(sorted([*rest, (strip, units // 2), (strip, units - units // 2)]))


def _search(cache: ShardCostCache, states: Sequence[State], config: NeuroShardConfig) -> list[_Found]:
    """The inner search from each of several states with the same number of shards."""
    for state in states:
        cache.add(state)
    keys = np.array(states)  # [C, N, 2]
    numbers = cache.numbers(keys[..., 0], keys[..., 1])
    # Least freedom first, then the highest cost, then the most bytes.
    order = np.lexsort((-cache.bytes[numbers], -cache.single_ms[numbers], cache.freedom[keys[..., 0]]))
    in_order = np.take_along_axis(keys, order[..., None], 1)  # [C, N, 2]
    total_ms, over_bytes, devices = greedy_grid(cache, in_order, np.array(config.caps))
    found = []
    for c, state in enumerate(states):
        k = int(np.argmin(total_ms[c]))
        where = np.empty(len(state), dtype=int)
        where[order[c]] = devices[c, k]
        fits = np.isfinite(total_ms[c, k])
        at = tuple(map(int, where)) if fits else ()
        found.append(_Found(float(total_ms[c, k]), state, at, int(over_bytes[c].min())))
    return found


def greedy_grid(cache: ShardCostCache, keys: np.ndarray,
                caps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All greedy passes in lockstep.

    keys: [C, N, 2] shards as strip and units, in the order of placing.
    caps: [K] on a device's columns, relative to the mean.

    Returns three arrays:
    total_ms: [C, K] cost; inf if a shard found no device. Such a shard goes to the least used device.
    over_bytes: [C, K] what devices hold beyond their memory.
    devices: [C, K, N] of each shard.
    """
    (n_states, n_shards, _), n_passes, n_devices = keys.shape, len(caps), len(cache.speed)
    state = PlacementState(cache, (n_states, n_passes))
    numbers = cache.numbers(keys[..., 0], keys[..., 1])  # [C, N]
    # The small constant absorbs rounding: a cap of exactly the mean has to be reachable.
    cap = cache.outputs[numbers].sum(1)[:, None, None] / n_devices * caps[:, None] + 1e-9  # [C, K, 1]
    pinned = cache.freedom < n_devices
    fits_all = np.ones((n_states, n_passes), dtype=bool)
    devices = np.zeros((n_states, n_passes, n_shards), dtype=np.int64)

    for i in range(n_shards):
        strip, units, number = keys[:, i, 0][:, None], keys[:, i, 1][:, None], numbers[:, i, None]  # [C, 1]
        outputs, single_ms = cache.outputs[number], cache.single_ms[number][..., None] / cache.speed
        narrow = (state.outputs.sum(-1) + outputs[..., None] <= cap) | pinned[strip][..., None]  # [C, K, D]
        fits = state.fits(strip, units) & narrow
        d = _least(np.where(fits, state.device_ms + single_ms, np.inf), state.used)  # [C, K]
        fits_all &= fits.any(-1)
        state.place(strip, units, d)
        devices[:, :, i] = d

    total_ms = (np.where(fits_all, state.cost_ms(), np.inf)
                if fits_all.any() else np.full(fits_all.shape, np.inf))
    return total_ms, np.maximum(state.used - np.maximum(state.free, 0), 0).sum(-1), devices


def _least(costs: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Index of the least cost along the last axis. Ties go to the least used, then to the first."""
    return np.where(costs == costs.min(-1, keepdims=True), used, np.iinfo(np.int64).max).argmin(-1)
