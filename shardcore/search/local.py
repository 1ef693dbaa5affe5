"""Local search over a population of plans: greedy starts, then changes of the device that everyone waits for, and shakes.

A step takes max over devices of (compute + backward exchange), for the forward exchange waits for the last, and then the longest
forward exchange: only a change of the device that is ready last makes it shorter. A change moves parts between two devices: all
of a strip, or some of its columns or rows (a split; a merge, where the other holds more of it), or two strips against each other
(a swap), or it cuts a whole table by rows, or unites it again. The changes of all plans of the population are screened at once
by what they make of their two devices; the best few of each are priced as whole plans. A plan that nothing makes cheaper is
shaken by some random changes (iterated local search: Lourenço, Martin, Stützle 2003), or begins again from the best.

Shapes: P plans, S strips, D devices, N changes, F features; 2 devices of a change and 2 slots for each, 2 kinds of op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from shardcore.cost.model import CostModel
from shardcore.memory import free_bytes
from shardcore.search.budget import Budget, Meter
from shardcore.search.feasible import feasible_pieces, pack_or_raise
from shardcore.search.ledger import Ledger, Piece
from shardcore.search.pieces import to_plan
from shardcore.types import Plan, Problem, ShardCoreError

SPACES = ("all", "columns", "halves")
POPULATION = 12
"""Plans that are improved side by side."""
_EVALS_EACH = 4000
"""With fewer evaluations for each, the population is smaller: a round screens some hundred changes of each plan."""
ROW_UNITS = 24
"""Shares that a table may be cut into by rows: halves, thirds, quarters, sixths, eighths, ... go evenly."""
_PRICED = 6
"""Changes of a plan and round that are priced as whole plans."""
_TARGETS = 32
"""Devices that a round looks at beside the last: the least busy ones, and as many at random."""
_SWAPS = 600
"""Swaps of a plan that a round screens at most."""
_DEFAULT = Budget(evals=500_000)
_SPLITS = (np.inf, 1.0, 0.6, 0.3)
"""Greedy starts cut what costs more than this share of a device's mean load."""
_LARGE = 1e6
"""Strips × devices above which one plan is improved alone: its rounds are large enough."""


def local(problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None, space: str = "all") -> Plan:
    """The best plan found within the budget (none: 500,000 evaluations), which counts screened changes and may be exceeded by a
    round of them. space: "all"; or "columns" (any widths), or "halves" of columns alone."""
    problem.require_setting(model.setting)
    if space not in SPACES:
        raise ShardCoreError(f"local search has no space {space!r}; there are {', '.join(SPACES)}")
    limited = budget if budget and (budget.evals or budget.seconds) else _DEFAULT
    meter = limited.start()
    population = POPULATION if limited.evals is None else max(1, min(POPULATION, limited.evals // _EVALS_EACH))
    search = Search(problem, model, np.random.default_rng(seed), meter, space, population)
    held = search.run()
    strips, devices = np.nonzero(held)
    pieces = [(int(s), int(held[s, d])) for s, d in zip(strips, devices, strict=True)]
    return to_plan(search.ledger.shards(pieces), devices.tolist(), problem, model, algorithm="local", seed=seed, space=space,
                   evals=meter.evals)


@dataclass
class Plans:
    """Plans in numbers: held [P, S, D] units, sums [P, D, 2, F], group_ms [P, D, 2] at speed 1, width [P, D, 2] in units of
    MIN_WIDTH, used [P, D] bytes, total_ms [P]."""

    held: np.ndarray
    sums: np.ndarray
    group_ms: np.ndarray
    width: np.ndarray
    used: np.ndarray
    total_ms: np.ndarray

    def take(self, chosen: np.ndarray | Sequence[int]) -> Plans:
        return Plans(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def put(self, at: np.ndarray, other: Plans) -> None:
        for f in fields(self):
            getattr(self, f.name)[at] = getattr(other, f.name)

    @staticmethod
    def join(several: Sequence[Plans]) -> Plans:
        return Plans(*(np.concatenate([getattr(p, f.name) for p in several]) for f in fields(Plans)))


@dataclass(frozen=True)
class Changes:
    """plan [N]; device [N, 2]: the two that change; strip, now [N, 2, 2]: of each, up to two strips and the units that it then
    holds (strip -1: none). Screened, also sums [N, 2, 2, F], group_ms, width [N, 2, 2], used [N, 2]: what the two devices then
    are, and score [N]."""

    plan: np.ndarray
    device: np.ndarray
    strip: np.ndarray
    now: np.ndarray
    sums: np.ndarray | None = None
    group_ms: np.ndarray | None = None
    width: np.ndarray | None = None
    used: np.ndarray | None = None
    score: np.ndarray | None = None

    def take(self, chosen: np.ndarray) -> Changes:
        return Changes(*(None if (x := getattr(self, f.name)) is None else x[chosen] for f in fields(self)))


class Search:
    def __init__(self, problem: Problem, model: CostModel, rng: np.random.Generator, meter: Meter, space: str,
                 population: int) -> None:
        self.problem, self.model, self.rng, self.meter, self.space = problem, model, rng, meter, space
        self.population = population
        self.free = np.array(free_bytes(problem), dtype=np.int64)
        self._use(Ledger(problem, model, feasible_pieces(problem), ROW_UNITS if space == "all" else 0))

    def _use(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.may_split = np.array([ledger.may_split((s, 2)) for s in range(len(ledger))])
        self.column_of = np.full(len(ledger), -1)
        self.column_of[ledger.twin[ledger.twin >= 0]] = np.flatnonzero(ledger.twin >= 0)
        self.per_width_ms = self._per_width_ms()

    def _per_width_ms(self) -> np.ndarray:
        """[2] ms that a unit of width on one device adds to both exchanges, roughly: what changes are screened with."""
        n = len(self.free)
        some = np.full((3, n, 2), 64.0)
        some[1, 0, 0], some[2, 0, 1] = 128.0, 128.0
        total = self.ledger.total_ms(np.zeros((3, n)), some)
        return (total[1:] - total[0]) / 64

    def run(self) -> np.ndarray:
        """[S, D] units held in the best plan found."""
        plans = self.starts()
        if len(self.free) == 1:
            return plans.held[0]
        best = plans.take([int(np.argmin(plans.total_ms))])
        stuck = np.zeros(len(plans.total_ms), dtype=bool)
        while self.meter.left():
            moved = self.improve(plans)
            least = int(np.argmin(plans.total_ms))
            if plans.total_ms[least] < best.total_ms[0]:
                best = plans.take([least])
            stuck = np.flatnonzero(~moved)
            if len(stuck) and self.meter.left():
                again = stuck[plans.total_ms[stuck] > best.total_ms[0] * (1 + 0.03 * self.rng.random(len(stuck)))]
                if len(again):
                    plans.put(again, best.take(np.zeros(len(again), dtype=int)))
                self.shake(plans, stuck)
        return best.held[0]

    # --- starts --------------------------------------------------------------------------------------------------------

    def starts(self) -> Plans:
        """Greedy plans, the cheapest of them as often as the population wants; where none fits, a packing for memory alone."""
        large = self.ledger.size.size * len(self.free) > _LARGE
        shares = _SPLITS[1:2] if large else _SPLITS
        cuts = [(share, rows) for share in shares for rows in (False, True)
                if not rows or (self.space == "all" and share < np.inf)]
        found = [p for share, rows in cuts if self.meter.left() and (p := self._greedy(share, rows)) is not None]
        plans = Plans.join(found or [self._packed()])
        n = 1 if large else self.population
        order = np.argsort(plans.total_ms, kind="stable")
        return plans.take(np.resize(order, n) if len(order) < n else order[:n])

    def _parts(self, share: float, rows: bool) -> list[Piece]:
        """The strips, those above `share` of a device's mean load cut into equal parts, by rows if wanted and possible."""
        whole = self.ledger.whole_pieces()
        self.ledger.add(whole)
        single = np.array([self.ledger.single_ms[self.ledger.parts(s, u)] for s, u in whole])
        limit = share * single.sum() / self.ledger.speed.sum()
        pieces = []
        for (strip, units), ms in zip(whole, single, strict=True):
            n = 1 if ms <= limit or not self.may_split[strip] else min(int(np.ceil(ms / limit)), len(self.free))
            if n > 1 and rows and self.ledger.twin[strip] >= 0:
                strip, units = int(self.ledger.twin[strip]), ROW_UNITS
            n = min(n, units)
            pieces += [(strip, units * (i + 1) // n - units * i // n) for i in range(n)]
        return pieces

    def _greedy(self, share: float, rows: bool) -> Plans | None:
        """Pieces by falling cost, each to the device that it leaves least busy; None where one fits nowhere."""
        ledger, n = self.ledger, len(self.free)
        plans = self._empty()
        held, all_sums, all_ms, width, used = plans.held[0], plans.sums[0], plans.group_ms[0], plans.width[0], plans.used[0]
        strips, units = (np.array(x) for x in zip(*self._parts(share, rows), strict=True))
        ledger.need(strips, units)
        for i in np.argsort(-ledger.single_ms[ledger.parts(strips, units)], kind="stable"):
            strip, kind = int(strips[i]), int(ledger.kind[strips[i]])
            now = held[strip] + units[i]
            ok = now <= ledger.size[strip] - (strip >= ledger.by_columns)
            now = np.where(ok, now, 0)
            ledger.need(np.full(n, strip), now)
            was, part = ledger.parts(strip, held[strip]), ledger.parts(strip, now)
            sums = all_sums[:, kind] + ledger.codes[part] - ledger.codes[was]
            extra, wider = ledger.bytes[part] - ledger.bytes[was], ledger.width[part] - ledger.width[was]
            group_ms = self._head(sums)
            ready = (all_ms[:, 1 - kind] + group_ms) / ledger.speed + width @ self.per_width_ms + wider * self.per_width_ms[kind]
            ready = np.where(ok & (used + extra <= self.free), ready, np.inf)
            d = int(np.argmin(ready))
            if not np.isfinite(ready[d]):
                return None
            held[strip, d] = now[d]
            all_sums[d, kind], all_ms[d, kind] = sums[d], group_ms[d]
            width[d, kind] += wider[d]
            used[d] += extra[d]
        return self._price(plans)

    def _empty(self) -> Plans:
        d, f = len(self.free), self.ledger.codes.shape[1]
        return Plans(np.zeros((1, len(self.ledger), d), dtype=np.int32), np.zeros((1, d, 2, f)), np.zeros((1, d, 2)),
                     np.zeros((1, d, 2), dtype=np.int64), np.zeros((1, d), dtype=np.int64), np.full(1, np.inf))

    def _packed(self) -> Plans:
        packing = pack_or_raise(self.problem)
        self._use(Ledger(self.problem, self.model, packing.pieces))
        pieces, plans, ledger = [self.ledger.piece(p) for p in packing.pieces], self._empty(), self.ledger
        ledger.add(pieces)
        held = plans.held[0]
        for (strip, units), device in zip(pieces, packing.devices, strict=True):
            held[strip, device] += units
        strips = np.broadcast_to(np.arange(len(ledger))[:, None], held.shape)
        ledger.need(strips.ravel(), held.ravel())
        part = ledger.parts(strips, held)
        plans.sums[0], plans.width[0] = (np.stack([of[part[ledger.kind == k]].sum(0) for k in (0, 1)], 1)
                                         for of in (ledger.codes, ledger.width))
        plans.group_ms, plans.used[0] = self._head(plans.sums), ledger.bytes[part].sum(0)
        return self._price(plans)

    def _head(self, sums: np.ndarray) -> np.ndarray:
        """[...] ms of groups at speed 1, from sums [..., F]."""
        return np.asarray(self.model.head(sums.reshape(-1, sums.shape[-1]))).reshape(sums.shape[:-1])

    def _price(self, plans: Plans) -> Plans:
        plans.total_ms[:] = self.ledger.total_ms(plans.group_ms.sum(-1) / self.ledger.speed, plans.width)
        self.meter.evals += len(plans.total_ms)
        return plans

    # --- rounds --------------------------------------------------------------------------------------------------------

    def improve(self, plans: Plans) -> np.ndarray:
        """Make in each plan the best change of the device that is ready last, or second to last: [P] whether there was one."""
        ready = plans.group_ms.sum(-1) / self.ledger.speed + plans.width @ self.per_width_ms  # [P, D]
        last = np.argsort(-ready, axis=1)
        moved = np.zeros(len(ready), dtype=bool)
        for rank in range(min(2, len(self.free))):
            changes = self._screened(plans, self._changes(plans, np.flatnonzero(~moved), last[:, rank], ready))
            moved |= self._best(plans, changes)
            if moved.all():
                break
        return moved

    def _changes(self, plans: Plans, some: np.ndarray, sources: np.ndarray, ready: np.ndarray) -> list[tuple[np.ndarray, ...]]:
        """All changes of those plans' sources and another device, as far as they are looked at: (plan, device, strip, now)."""
        found = []
        for p in some:
            source, held = int(sources[p]), plans.held[p]
            strips = np.flatnonzero(held[:, source])
            if len(strips):
                targets = self._targets(source, ready[p])
                found += [self._transfers(p, held, strips, source, targets), self._swaps(p, held, strips, source, targets)]
                if self.space == "all":
                    found += [self._cuts(p, held, strips, source, targets), self._unions(p, held, strips, source)]
        return found

    def _targets(self, source: int, ready: np.ndarray) -> np.ndarray:
        order = np.argsort(ready, kind="stable")
        order = order[order != source]
        if len(order) <= _TARGETS:
            return order
        half = _TARGETS // 2
        return np.concatenate([order[:half], self.rng.choice(order[half:], half, replace=False)])

    def _transfers(self, plan: int, held: np.ndarray, strips: np.ndarray, source: int, targets: np.ndarray) -> tuple:
        units = held[strips, source].astype(np.int64)
        some = self.may_split[strips] & (units > 1)
        shares = [units // 2] if self.space == "halves" else [units // 2, units // 3, np.ones_like(units), (
            1 + self.rng.random(len(units)) * (units - 1)).astype(np.int64)]
        what, give = [strips], [units]
        for share in shares:
            ok = some & (share > 0) & (share < units)
            what.append(strips[ok])
            give.append(share[ok])
        i, j = _pairs(sum(map(len, what)), len(targets))
        what, give, target = np.concatenate(what)[i], np.concatenate(give)[i], targets[j]
        return _change(plan, source, target, what, held[what, source] - give, -1, 0, what, held[what, target] + give, -1, 0)

    def _swaps(self, plan: int, held: np.ndarray, strips: np.ndarray, source: int, targets: np.ndarray) -> tuple:
        theirs, where = np.nonzero(held[:, targets])
        if len(strips) * len(theirs) > _SWAPS:
            i, j = self.rng.integers(0, len(strips), _SWAPS), self.rng.integers(0, len(theirs), _SWAPS)
        else:
            i, j = _pairs(len(strips), len(theirs))
        what, other, target = strips[i], theirs[j], targets[where[j]]
        ok = what != other
        what, other, target = what[ok], other[ok], target[ok]
        return _change(plan, source, target, what, 0, other, held[other, source] + held[other, target],
                       what, held[what, target] + held[what, source], other, 0)

    def _cuts(self, plan: int, held: np.ndarray, strips: np.ndarray, source: int, targets: np.ndarray) -> tuple:
        """Tables that the source holds whole, cut by rows."""
        whole = strips[(self.ledger.twin[strips] >= 0) & (held[strips, source] == self.ledger.size[strips])]
        gives = np.array([ROW_UNITS // 2, ROW_UNITS // 3, ROW_UNITS // 4, 1 + int(self.rng.random() * (ROW_UNITS - 1))])
        i, j = _pairs(len(whole) * len(gives), len(targets))
        what, give = whole[i // len(gives)], gives[i % len(gives)]
        twin = self.ledger.twin[what]
        return _change(plan, source, targets[j], what, 0, twin, ROW_UNITS - give, twin, give, -1, 0)

    def _unions(self, plan: int, held: np.ndarray, strips: np.ndarray, source: int) -> tuple:
        """Tables cut by rows between the source and one other device, whole again on either."""
        cut = strips[strips >= self.ledger.by_columns]
        others = held[cut] > 0
        both = others.sum(1) == 2
        cut, others = cut[both], others[both]
        others[:, source] = False
        target, column = others.argmax(1), self.column_of[cut]
        size = self.ledger.size[column]
        here = _change(plan, source, target, cut, 0, column, size, cut, 0, -1, 0)
        there = _change(plan, source, target, cut, 0, -1, 0, cut, 0, column, size)
        return tuple(np.concatenate(x) for x in zip(here, there, strict=True))

    def _screened(self, plans: Plans, found: list[tuple[np.ndarray, ...]]) -> Changes | None:
        """The changes that fit, with what they make of their two devices, and that as their score. A table cut by rows is never
        left with all of them on one device: that is the whole table, another strip."""
        if not found:
            return None
        plan, device, strip, now = (np.concatenate(x) for x in zip(*found, strict=True))
        ledger, none = self.ledger, strip < 0
        strip = np.where(none, 0, strip)
        at = plan[:, None, None]
        held = plans.held[at, strip, device[:, :, None]]
        now = np.where(none, held, now)
        whole = ((strip >= ledger.by_columns) & (now == ledger.size[strip])).any((1, 2))
        ledger.need(strip.ravel(), now.ravel())
        was_part, part = ledger.parts(strip, held), ledger.parts(strip, now)
        before = plans.used[plan[:, None], device]
        used = before + (ledger.bytes[part] - ledger.bytes[was_part]).sum(2)
        fits = (used <= np.maximum(self.free[device], before)).all(1) & ~whole
        self.meter.evals += len(plan)
        plan, device, strip, now, was_part, part, used, none = (x[fits] for x in (plan, device, strip, now, was_part, part, used,
                                                                                none))
        kind, at = ledger.kind[strip], plan[:, None]
        sums, width = plans.sums[at, device], plans.width[at, device]
        wider = ledger.width[part] - ledger.width[was_part]
        i, j = np.arange(len(plan))[:, None], np.arange(2)[None]
        for slot in (0, 1):
            k = kind[:, :, slot]
            sums[i, j, k] += ledger.codes[part[:, :, slot]] - ledger.codes[was_part[:, :, slot]]
            width[i, j, k] += wider[:, :, slot]
        group_ms = self._head(sums)
        ready = group_ms.sum(2) / ledger.speed[device] + width @ self.per_width_ms
        # The later of the two counts; the earlier breaks ties, for less work is room for later changes.
        score = ready.max(1) + 0.1 * ready.min(1)
        return Changes(plan, device, np.where(none, -1, strip), now, sums, group_ms, width, used, score)

    def _best(self, plans: Plans, changes: Changes | None) -> np.ndarray:
        """Make of each plan's best screened changes the cheapest, if it is cheaper than the plan: [P] whether it was."""
        made = np.zeros(len(plans.total_ms), dtype=bool)
        if changes is None or not len(changes.plan):
            return made
        order = np.lexsort((changes.score, changes.plan))
        first = np.searchsorted(changes.plan[order], changes.plan[order])  # where each plan's changes begin
        few = changes.take(order[np.arange(len(order)) - first < _PRICED])
        at = np.arange(len(few.plan))[:, None]
        group_ms, width = plans.group_ms[few.plan], plans.width[few.plan]
        group_ms[at, few.device], width[at, few.device] = few.group_ms, few.width
        total = self.ledger.total_ms(group_ms.sum(-1) / self.ledger.speed, width)
        self.meter.evals += len(total)
        # Of equal totals, less work in all.
        worth = total + 1e-3 * group_ms.mean((1, 2)) - (plans.total_ms + 1e-3 * plans.group_ms.mean((1, 2)))[few.plan]
        order = np.lexsort((worth, few.plan))
        chosen = order[np.unique(few.plan[order], return_index=True)[1]]
        chosen = chosen[worth[chosen] < -1e-9]
        self._make(plans, few, chosen)
        plans.total_ms[few.plan[chosen]] = total[chosen]
        made[few.plan[chosen]] = True
        return made

    def _make(self, plans: Plans, changes: Changes, chosen: np.ndarray) -> None:
        """Carry out the chosen changes, at most one of each plan."""
        one = changes.take(chosen)
        at = one.plan[:, None]
        for slot in (0, 1):
            strip, some = one.strip[:, :, slot], one.strip[:, :, slot] >= 0
            p, device = np.broadcast_to(at, strip.shape)[some], one.device[some]
            plans.held[p, strip[some], device] = one.now[:, :, slot][some]
        plans.sums[at, one.device], plans.group_ms[at, one.device] = one.sums, one.group_ms
        plans.width[at, one.device], plans.used[at, one.device] = one.width, one.used

    def shake(self, plans: Plans, some: np.ndarray) -> None:
        """Two to five random changes of each of some plans."""
        n = len(self.free)
        for _ in range(int(self.rng.integers(2, 6))):
            found = []
            for p in some:
                source, held = int(self.rng.integers(n)), plans.held[p]
                strips = np.flatnonzero(held[:, source])
                if not len(strips):
                    continue
                strips = strips[self.rng.integers(0, len(strips), 2)]
                targets = (source + 1 + self.rng.integers(0, n - 1, 2)) % n
                found.append(self._transfers(p, held, strips, source, targets))
                if self.space == "all":
                    found += [self._cuts(p, held, strips, source, targets), self._unions(p, held, strips, source)]
            changes = self._screened(plans, found)
            if changes is not None and len(changes.plan):
                order = self.rng.permutation(len(changes.plan))
                self._make(plans, changes, order[np.unique(changes.plan[order], return_index=True)[1]])
        self._price(plans)


def _change(plan: int, source: int, target: np.ndarray, *slots: np.ndarray | int) -> tuple[np.ndarray, ...]:
    """Changes as arrays (plan, device, strip, now), from (strip, now) of the source's two slots and of the target's two."""
    n = len(target)
    table = np.empty((2, n, 4), dtype=np.int64)
    for i, x in enumerate(slots):
        table[i % 2, :, i // 2] = x
    device = np.empty((n, 2), dtype=np.int64)
    device[:, 0], device[:, 1] = source, target
    return np.full(n, plan), device, table[0].reshape(n, 2, 2), table[1].reshape(n, 2, 2)


def _pairs(n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(n), m), np.tile(np.arange(m), n)
