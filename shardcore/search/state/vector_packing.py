"""Packing of shards that take different bytes in each phase of a step: vectors, not numbers.

Shapes: D devices, N shards, P phases, C counts of caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.core.progress import ticking
from shardcore.step.memory import Caches
from shardcore.step.memory_account import Account

_NODES = 400
"""Steps at most of the depth-first search."""
_FEW = 12
"""Shards at most for which there is such a search."""

Packed = tuple[float, list[int] | None]
"""The bytes that some device lacks, and the device of each shard. None: no packing was found."""


class VectorPacking:
    """Shards to pack into devices. `best` does it.

    account: limits of devices, and the bytes of their local batch.
    caches: those that the shards may have. Each is as wide as its widest shard, so its bytes do not add up.
    load: [D, P + C] bytes, and counts of caches, that devices have already without the local batch.
      Kept transposed, as [P + C, D].
    vectors: [N, P + C] bytes and counts of each shard.
    allowed: [N] devices where each shard may be.
    names: [N] name of each shard's table. Shards of a table go to different devices.

    Kept in the packing:

    may_hold: [P, D] bytes that devices may hold beside the local batch.
    before: bytes that some device lacks before any shard is packed. -inf if all are empty.
    forbidden: [N] devices where each shard may not be.
    siblings: shards of each table, by its name. Empty for a single one.
    order: numbers of the shards in the order of packing. rank: [N] the place of each in it.
    """

    def __init__(
        self,
        account: Account,
        caches: Caches,
        load: np.ndarray,
        vectors: np.ndarray,
        allowed: Sequence[Sequence[int]],
        names: Sequence[str],
    ) -> None:
        self.caches, self.phases, n_limits = caches, account.phases, len(account.base)
        # Phases first: numpy finds the largest of a few rows much faster than of as many columns.
        self.may_hold = np.ascontiguousarray((account.limits - account.base).T)
        self.load = np.ascontiguousarray(load.T)
        self.vectors, self.names = vectors, names
        # An empty device lacks nothing, even if its local batch would not fit there.
        used = load.any(1)
        self.before = float(self._lacks(self.load)[used].max(initial=-np.inf))
        n_devices = len(load)
        # Mostly there are none, and then this takes no time.
        every = np.arange(n_devices)
        self.forbidden = [np.delete(every, a) if len(a) < n_devices else every[:0] for a in allowed]
        self.restricted = any(map(len, self.forbidden))
        # [N] bytes of each shard in the phase in which it takes most.
        self.size = vectors[:, :n_limits].max(1, initial=0.0)
        self.freedom = np.array([len(a) for a in allowed], dtype=int)
        # Shards of a table have to part: on one device they would be one shard.
        shards: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            shards.setdefault(name, []).append(i)
        self.siblings = {name: of if len(of) > 1 else () for name, of in shards.items()}
        self._sort(np.zeros(len(names)))

    def _sort(self, first: np.ndarray) -> None:
        """Order shards: those with least freedom, then those that are `first`, then the largest."""
        self.order = np.lexsort((-self.size, -first, self.freedom)).tolist()
        # It tells which shards of a table are placed already.
        self.rank = np.argsort(self.order)

    def best(self, most: float) -> Packed:
        """The bytes that some device lacks, and the device of each shard.

        None if no packing is found that lacks less than `most`.
        """
        # Quick ways first: even loads, then full devices, which leave larger gaps on others.
        best = self._greedy(False, most)
        if best[0] > 0:
            best = _better(best, self._greedy(True, min(most, best[0])))
        if best[0] > 0 and len(self.order) <= _FEW:
            # All packings that lack less, as far as steps allow: it would take exponential time.
            self._nodes = _NODES
            self._best: Packed = min(most, best[0]), None
            self._deepen(0, self.load.copy(), self.before, [0] * len(self.order))
            best = _better(best, self._best)
        if best[0] > 0 and len(self.caches):
            # Wide caches together leave other devices narrow ones.
            widest = self.caches.widest(self.vectors[:, len(self.may_hold) :])
            self._sort(np.max(widest, axis=0))
            best = _better(best, self._greedy(True, min(most, best[0])))
        return best if best[0] < most else (best[0], None)

    def _lacks(self, load: np.ndarray) -> np.ndarray:
        """[D] bytes that devices lack with loads [P + C, D]."""
        # [P, D], with limits of ops after the phases.
        lacks = load[: len(self.may_hold)] - self.may_hold
        if len(self.caches):
            lacks[: self.phases] += self.caches.padding(load[len(self.may_hold) :].T)
        return lacks.max(0)

    def _after(self, i: int, load: np.ndarray, devices: Sequence[int], placed: int) -> np.ndarray:
        """[D] bytes that each device lacks with shard i on top of a load [P + C, D]. inf where it may not be."""
        lacks = self._lacks(load + self.vectors[i][:, None])
        lacks[self.forbidden[i]] = np.inf
        # Only those before it have a device that is decided.
        for j in self.siblings[self.names[i]]:
            if self.rank[j] < placed:
                lacks[devices[j]] = np.inf
        return lacks

    def _greedy(self, full: bool, most: float) -> Packed:
        """Place shards in their order. No devices if some device lacks `most`, or more.

        full: whether each goes to the fullest device that has room, or else to the emptiest.
        """
        load, devices, worst = self.load.copy(), [0] * len(self.order), self.before
        for placed, i in enumerate(ticking(self.order)):
            lacks = self._after(i, load, devices, placed)
            fits = lacks <= 0
            # `lacks` is negative where it fits: the largest of these is the fullest device that has room.
            device = int(np.where(fits, lacks, -np.inf).argmax() if full and fits.any() else lacks.argmin())
            devices[i], worst = device, max(worst, float(lacks[device]))
            # No better than what is known, whatever the rest does.
            if lacks[device] == np.inf or worst >= most:
                return worst, None
            load[:, device] += self.vectors[i]
        return worst, devices

    def _deepen(self, placed: int, load: np.ndarray, worst: float, devices: list[int]) -> None:
        """Pack the shards from place `placed` in the order on: each device in turn, the emptiest first.

        load: [P + C, D] of the shards before. It is changed, and changed back.
        worst: bytes that some device lacks so far.
        devices: of the shards before.
        """
        # More shards never lower `worst`. And a packing that lacks nothing needs no better one.
        if worst >= self._best[0] or self._nodes <= 0 or self._best[0] <= 0:
            return
        if placed == len(self.order):
            self._best = worst, devices.copy()
            return
        i, seen = self.order[placed], set()
        lacks = self._after(i, load, devices, placed)
        for device in np.argsort(lacks, kind="stable").tolist():
            # Devices with equal loads are the same, unless some shards may not use both.
            state = load[:, device].tobytes(), self.may_hold[:, device].tobytes()
            if lacks[device] >= self._best[0] or (state in seen and not self.restricted):
                continue
            seen.add(state)
            self._nodes -= 1
            devices[i] = device
            load[:, device] += self.vectors[i]
            self._deepen(placed + 1, load, max(worst, float(lacks[device])), devices)
            # Off again, for the next device.
            load[:, device] -= self.vectors[i]


def _better(best: Packed, other: Packed) -> Packed:
    """The one of two packings that lacks less."""
    return other if other[1] is not None and other[0] < best[0] else best
