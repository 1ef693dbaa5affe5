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
"""Steps of the depth-first search that packs few shards."""
_FEW = 12
"""Shards that are packed so."""


class VectorPacking:
    """Shards to pack.

    account: limits of devices, and the bytes of their local batch.
    caches: those that the shards may have. Each is as wide as its widest shard, so its bytes do not add up.
    load: [D, P + C] bytes, and counts of caches, that devices have already without the local batch.
    vectors: [N, P + C] those of shards.
    allowed: (N) devices of each shard.
    names: (N) of its table. Shards of a table go to different devices.
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
        # [P, D], for numpy finds the largest of a few rows much faster than of as many columns.
        self.may_hold = np.ascontiguousarray((account.limits - account.base).T)
        self.load = np.ascontiguousarray(load.T)
        self.vectors, self.names = vectors, names
        # An empty device lacks nothing, even if its local batch would not fit there.
        used = load.any(1)
        self.before = float(self._lacks(self.load)[used].max(initial=-np.inf))
        n_devices = len(load)
        # None: all devices, which needs no mask.
        self.allowed = [None if len(a) == n_devices else np.array(a) for a in allowed]
        self.restricted = any(a is not None for a in self.allowed)
        # In the phase in which the shard takes most.
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
        # [N] place of each shard in the order, to tell which of a table are placed already.
        self.rank = np.argsort(self.order)

    def best(self, most: float) -> tuple[float, list[int] | None]:
        """The bytes that some device lacks, and the device of each shard.

        None if no packing is found that lacks less than `most`.
        """
        # Quick ways first. Even loads, then full devices, which leave larger gaps on others.
        lacks, devices = self._greedy(False, most)
        if lacks > 0:
            lacks, devices = self._better(lacks, devices, self._greedy(True, min(most, lacks)))
        if lacks > 0 and len(self.order) <= _FEW:
            lacks, devices = self._better(lacks, devices, self._depth_first(min(lacks, most)))
        if lacks > 0 and len(self.caches):
            # Wide caches together leave other devices narrow ones.
            widest = self.caches.widest(self.vectors[:, len(self.may_hold) :])
            self._sort(np.max(widest, axis=0))
            lacks, devices = self._better(lacks, devices, self._greedy(True, min(most, lacks)))
        return lacks, devices if lacks < most else None

    @staticmethod
    def _better(
        lacks: float, devices: list[int] | None, other: tuple[float, list[int] | None]
    ) -> tuple[float, list[int] | None]:
        return other if other[1] is not None and other[0] < lacks else (lacks, devices)

    def _lacks(self, load: np.ndarray) -> np.ndarray:
        """[D] bytes that devices lack with loads [P + C, D]."""
        # [P, D], with limits of ops after the phases.
        lacks = load[: len(self.may_hold)] - self.may_hold
        if len(self.caches):
            lacks[: self.phases] += self.caches.padding(load[len(self.may_hold) :].T)
        return lacks.max(0)

    def _depth_first(self, most: float) -> tuple[float, list[int] | None]:
        # A search in all ways takes exponential time, so its steps are limited.
        self._nodes = _NODES
        self._best: tuple[float, list[int] | None] = most, None
        self._deepen(0, self.load.copy(), self.before, [0] * len(self.order))
        return self._best

    def _after(self, i: int, load: np.ndarray, devices: Sequence[int], placed: int) -> np.ndarray:
        """[D] bytes that each device lacks with shard i on top of a load [P + C, D]. inf where it may not be."""
        lacks = self._lacks(load + self.vectors[i][:, None])
        if self.allowed[i] is not None:
            inside = np.full(len(lacks), np.inf)
            inside[self.allowed[i]] = lacks[self.allowed[i]]
            lacks = inside
        # Only those before it have a device that is decided.
        for j in self.siblings[self.names[i]]:
            if self.rank[j] < placed:
                lacks[devices[j]] = np.inf
        return lacks

    def _greedy(self, full: bool, most: float) -> tuple[float, list[int] | None]:
        """Place shards by falling size. full: on the fullest device that has room; else on the emptiest.

        No devices if some device lacks `most`, or more.
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
        """Try all packings in turn, the emptiest device first, as far as steps allow."""
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
