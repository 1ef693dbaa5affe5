"""NeuroShard's search (MLSys 2023, arXiv 2305.01868): a beam over column cuts around a grid of greedy passes.

Inner: pieces by falling single cost, each to the device whose fused cost is lowest, within its memory and within a cap on its
columns, scale × the mean; one pass for each of several scales, the best by total cost stays. Outer: from each of a few states
halve each of the largest and of the costliest pieces, run the inner search, keep the best few.

Against the released code: a pass without cap, and `packing` where no pass fits, so that what fits gets a plan; states that
differ only in the order of their cuts count once; halves that meet on a device count as the one shard they become; slots
of the candidates go to pieces that can be cut. On unequal devices the cost of a device is taken at its speed and with the
piece's own, which on equal ones changes nothing. Tables that are kept together go as one; pinned ones go first, whatever the
cap.

Shapes: C states searched at once, P their pieces, K passes, S strips, D devices, F features, 2 the kinds of op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.memory import free_bytes
from shardcore.search.budget import Budget
from shardcore.search.feasible import feasible_pieces, pack_or_raise
from shardcore.search.ledger import Ledger, Piece
from shardcore.search.pieces import to_plan
from shardcore.types import Plan, Problem, ShardCoreError

State = tuple[Piece, ...]
"""Sorted pieces: what is cut how, not yet where it goes."""

_ROWS_AT_ONCE = 16_384
"""Devices × passes × states that run in lockstep: bounds the memory, and how far a budget in seconds is overrun."""


@dataclass(frozen=True)
class NeuroShardConfig:
    """beam: states kept; candidates: pieces halved of the largest, and of the costliest; steps: cuts at most; scales: caps on
    a device's columns, relative to the mean; uncapped: one pass more, without a cap."""

    beam: int = 3
    candidates: int = 10
    steps: int = 10
    scales: tuple[float, ...] = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5)
    uncapped: bool = True

    def __post_init__(self) -> None:
        if min(self.beam, self.candidates, len(self.caps)) < 1 or self.steps < 0:
            raise ShardCoreError(f"{self} needs a beam, candidates and passes of 1 or more, and steps of 0 or more")

    @property
    def caps(self) -> tuple[float, ...]:
        """One for each pass of an inner search."""
        return (*self.scales, float("inf")) if self.uncapped else tuple(self.scales)


@dataclass(frozen=True)
class _Found:
    """The best plan of a state; infinite ms and no devices where no pass fits."""

    ms: float
    pieces: State
    devices: tuple[int, ...]


def neuroshard(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None,
               config: NeuroShardConfig = NeuroShardConfig()) -> Plan:  # noqa: B008 (frozen)
    """The best plan of the beam. Deterministic: the seed is only recorded. One evaluation is one greedy pass priced.

    Raises Infeasible (see `feasible_pieces`) and SettingMismatch.
    """
    problem.require_setting(model.setting)
    meter = (budget or Budget()).start()
    pieces = feasible_pieces(problem)
    ledger = Ledger(problem, model, pieces)
    [best] = _search(ledger, [tuple(sorted(map(ledger.piece, pieces)))], config)
    meter.evals += len(config.caps)
    fallback = None
    if not best.devices:
        packing = pack_or_raise(problem)
        ledger = Ledger(problem, model, packing.pieces)
        pairs = sorted(zip(map(ledger.piece, packing.pieces), packing.devices, strict=True))
        state, devices = tuple(p for p, _ in pairs), tuple(d for _, d in pairs)
        best = fallback = _Found(ledger.plan_ms(state, devices), state, devices)
    chunk = max(1, _ROWS_AT_ONCE // (len(config.caps) * len(problem.topology)))
    beam = [best.pieces]
    for _ in range(config.steps):
        states = list(dict.fromkeys(s for state in beam for s in _halvings(ledger, state, config.candidates)))
        found: list[_Found] = []
        while len(found) < len(states):
            n = meter.affordable(min(chunk, len(states) - len(found)), len(config.caps))
            if n == 0:
                break
            found += _search(ledger, states[len(found):len(found) + n], config)
            meter.evals += n * len(config.caps)
        beam = [f.pieces for f in sorted(found, key=lambda f: f.ms)[:config.beam]]
        best = min([best, *found], key=lambda f: f.ms)
        if len(found) < len(states) or not found:
            break
    return to_plan(ledger.shards(best.pieces), best.devices, problem, model, algorithm="neuroshard", seed=seed,
                   packed=best is fallback, evals=meter.evals, config=asdict(config))


def _halvings(ledger: Ledger, state: State, n: int) -> list[State]:
    """The states with one more cut: of each of the n largest and the n costliest pieces that can be cut."""
    ledger.add(state)
    pieces = [p for p in dict.fromkeys(state) if ledger.may_split(p)]
    if not pieces:
        return []
    parts = ledger.parts(*np.array(pieces).T)
    chosen = {*np.argsort(-ledger.bytes[parts], kind="stable")[:n], *np.argsort(-ledger.single_ms[parts], kind="stable")[:n]}
    return [_halve(state, pieces[i]) for i in sorted(chosen)]


def _halve(state: State, piece: Piece) -> State:
    strip, units = piece
    rest = list(state)
    rest.remove(piece)
    return tuple(sorted([*rest, (strip, units // 2), (strip, units - units // 2)]))


@dataclass(frozen=True)
class _Bonds:
    """What constraints ask of strips. allowed [S, D]: the devices they may go to; group [S]: their group, -1 for none."""

    allowed: np.ndarray
    group: np.ndarray

    @classmethod
    def of(cls, ledger: Ledger) -> _Bonds | None:
        """None where there are no such constraints."""
        problem = ledger.problem
        if not problem.pinned and not problem.bundle_of:
            return None
        names = [ledger.table(strip).name for strip in range(len(ledger))]
        allowed = np.ones((len(names), len(problem.topology)), dtype=bool)
        for strip, name in enumerate(names):
            if name in problem.pinned:
                allowed[strip] = False
                allowed[strip, list(problem.pinned[name])] = True
        numbers = {group: i for i, group in enumerate(problem.constraints.together)}
        return cls(allowed, np.array([numbers[problem.bundle_of[n]] if n in problem.bundle_of else -1 for n in names]))

    def summed(self, strips: np.ndarray, of: np.ndarray) -> np.ndarray:
        """[C, P] of each piece, or of all of its group. strips, of [C, P]: the pieces, all tables of a group among them."""
        group = self.group[strips]
        sums = np.zeros((len(group), group.max() + 2), dtype=of.dtype)
        np.add.at(sums, (np.arange(len(group))[:, None], group), of)  # group -1 is the last, which nothing reads
        return np.where(group >= 0, np.take_along_axis(sums, group, 1), of)


class _Asked:
    """Constraints on pieces [C, P, 2] in the order of placing. more_bytes, more_units, more_ms [C, P]: what the others of a
    piece's group add; follows [C, P]: the piece goes where the one before it, of its group, went."""

    def __init__(self, ledger: Ledger, pieces: np.ndarray, bonds: _Bonds) -> None:
        strips, units = pieces[..., 0], pieces[..., 1]
        parts, group = ledger.parts(strips, units), bonds.group[strips]
        self.more_bytes, self.more_units, self.more_ms = (
            bonds.summed(strips, own) - own for own in (ledger.bytes[parts], units, ledger.single_ms[parts]))
        self.follows = np.zeros(strips.shape, dtype=bool)
        self.follows[:, 1:] = (group[:, 1:] == group[:, :-1]) & (group[:, 1:] >= 0)
        self.strips, self.allowed, self.pinned = strips, bonds.allowed, ~bonds.allowed.all(1)

    def fits(self, p: int, used: np.ndarray, free: np.ndarray, columns: np.ndarray, cap: np.ndarray,
             devices: np.ndarray) -> np.ndarray:
        """[C, K, D]: where the pieces p may go. used, columns [C, K, D] with them; devices [C, K, P]: where those before went."""
        strip = self.strips[:, p]
        narrow = (columns + self.more_units[:, p, None, None] <= cap) | self.pinned[strip, None, None]
        fits = (used + self.more_bytes[:, p, None, None] <= free) & narrow & self.allowed[strip, None]
        beside = devices[:, :, p - 1, None] == np.arange(used.shape[-1])
        return np.where(self.follows[:, p, None, None], beside, fits)


def _search(ledger: Ledger, states: Sequence[State], config: NeuroShardConfig) -> list[_Found]:
    """The inner search from each of several states with the same number of pieces."""
    for state in states:
        ledger.add(state)
    pieces = np.array(states)  # [C, P, 2]
    parts = ledger.parts(pieces[..., 0], pieces[..., 1])
    n_bytes, single_ms, first = ledger.bytes[parts], ledger.single_ms[parts], ()
    bonds = _Bonds.of(ledger)
    if bonds:
        strips = pieces[..., 0]
        n_bytes, single_ms = bonds.summed(strips, n_bytes), bonds.summed(strips, single_ms)
        first = (bonds.allowed.sum(1)[strips],)
    order = np.lexsort((*((bonds.group[strips],) if bonds else ()), -n_bytes, -single_ms, *first))  # [C, P]
    total_ms, devices = greedy_grid(ledger, np.take_along_axis(pieces, order[..., None], 1), np.array(config.caps), bonds)
    found = []
    for c, state in enumerate(states):
        k = int(np.argmin(total_ms[c]))
        placed = np.empty(len(state), dtype=int)
        placed[order[c]] = devices[c, k]
        fits = np.isfinite(total_ms[c, k])
        found.append(_Found(float(total_ms[c, k]), state, tuple(map(int, placed)) if fits else ()))
    return found


def greedy_grid(ledger: Ledger, pieces: np.ndarray, caps: np.ndarray,
                bonds: _Bonds | None = None) -> tuple[np.ndarray, np.ndarray]:
    """All greedy passes in lockstep. pieces [C, P, 2]: strip and units in the order of placing, groups side by side; caps [K]: on
    a device's columns, relative to the mean.

    Returns total_ms [C, K], inf where a piece found no device, and devices [C, K, P].
    """
    (n_states, n_pieces, _), n_passes, n_devices = pieces.shape, len(caps), len(ledger.speed)
    shape = (n_states, n_passes, n_devices)
    c, k = np.ogrid[:n_states, :n_passes]
    free = np.array(free_bytes(ledger.problem))
    cap = pieces[..., 1].sum(1)[:, None, None] / n_devices * caps[:, None] + 1e-9  # [C, K, 1]
    held = np.zeros((n_states, n_passes, len(ledger), n_devices), dtype=np.int32)
    used, columns = np.zeros(shape, dtype=np.int64), np.zeros((*shape, 2), dtype=np.int64)
    sums, group_ms = np.zeros((*shape, 2, ledger.codes.shape[1])), np.zeros((*shape, 2))
    asked = bonds and _Asked(ledger, pieces, bonds)
    fits_all, devices = np.ones((n_states, n_passes), dtype=bool), np.zeros((n_states, n_passes, n_pieces), dtype=np.int64)

    for p in range(n_pieces):
        strip, units = pieces[:, p, 0][:, None], pieces[:, p, 1][:, None]  # [C, 1]
        before = held[c, k, strip]  # [C, K, D]
        was = ledger.parts(strip[..., None], before)
        becomes = ledger.parts(strip[..., None], before + units[..., None])
        extra = ledger.bytes[becomes] - ledger.bytes[was]
        single_ms = ledger.single_ms[ledger.parts(strip, units)][..., None] / ledger.speed
        if asked is None:
            fits = (used + extra <= free) & (columns.sum(-1) + units[..., None] <= cap)
        else:
            fits = asked.fits(p, used + extra, free, columns.sum(-1) + units[..., None], cap, devices)
            single_ms = single_ms + asked.more_ms[:, p, None, None] / ledger.speed
        d = _least(np.where(fits, group_ms.sum(-1) / ledger.speed + single_ms, np.inf), used)  # [C, K]
        fits_all &= fits.any(-1)
        kind = np.broadcast_to(ledger.kind[strip], d.shape)
        sums[c, k, d, kind] += ledger.codes[becomes[c, k, d]] - ledger.codes[was[c, k, d]]
        group_ms[c, k, d, kind] = ledger.model.head(sums[c, k, d, kind].reshape(-1, sums.shape[-1])).reshape(d.shape)
        used[c, k, d] += extra[c, k, d]
        columns[c, k, d, kind] += units
        held[c, k, strip, d] += units
        devices[:, :, p] = d

    total_ms = np.full(fits_all.shape, np.inf)
    if fits_all.any():
        total_ms[fits_all] = ledger.total_ms(group_ms[fits_all].sum(-1) / ledger.speed, columns[fits_all])
    return total_ms, devices


def _least(costs: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Along the last axis the index of the least cost, among equals of the least used, among equals the first."""
    return np.where(costs == costs.min(-1, keepdims=True), used, np.iinfo(np.int64).max).argmin(-1)
