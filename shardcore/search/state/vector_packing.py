"""Packing of shards that take different bytes in each phase of a step: vectors, not numbers.

Shapes: D devices, N shards, P phases.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardcore.core.progress import ticking

_NODES = 400
"""Steps of the depth-first search that packs few shards."""
_FEW = 12
"""Shards that are packed so."""


class VectorPacking:
    """Shards to pack.

    may_hold: [D, P] bytes.
    load: [D, P] bytes that devices have already.
    used: whether each device has a shard already.
    vectors: [N, P] bytes of shards.
    allowed: (N) devices of each shard.
    names: (N) of its table. Shards of a table go to different devices.
    """

    def __init__(
        self,
        may_hold: np.ndarray,
        load: np.ndarray,
        used: bool,
        vectors: np.ndarray,
        allowed: Sequence[Sequence[int]],
        names: Sequence[str],
    ) -> None:
        # [P, D], for numpy finds the largest of a few rows much faster than of as many columns.
        self.may_hold, self.load = np.ascontiguousarray(may_hold.T), np.ascontiguousarray(load.T)
        self.vectors, self.names = vectors, names
        self.before = float((load - may_hold).max()) if used else -np.inf
        self.allowed = [None if len(a) == len(may_hold) else np.array(a) for a in allowed]
        self.restricted = any(a is not None for a in self.allowed)
        size = vectors.max(1) if len(vectors) else np.zeros(0)
        # Those with least freedom first, then the largest.
        self.order = np.lexsort((-size, np.array([len(a) for a in allowed], dtype=int))).tolist()
        self.rank = np.argsort(self.order)
        shards: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            shards.setdefault(name, []).append(i)
        self.siblings = {name: of if len(of) > 1 else () for name, of in shards.items()}

    def best(self, most: float) -> tuple[float, list[int] | None]:
        """The bytes that some device lacks, and the device of each shard.

        None if no packing is found that lacks less than `most`.
        """
        lacks, devices = self._greedy(False, most)
        if lacks > 0:
            full_lacks, full_devices = self._greedy(True, min(most, lacks))
            if full_lacks < lacks:
                lacks, devices = full_lacks, full_devices
        if lacks > 0 and len(self.order) <= _FEW:
            least, of_least = self._depth_first(min(lacks, most))
            if of_least is not None:
                lacks, devices = least, of_least
        return lacks, devices if lacks < most else None

    def _depth_first(self, most: float) -> tuple[float, list[int] | None]:
        self._nodes = _NODES
        self._best: tuple[float, list[int] | None] = most, None
        self._deepen(0, self.load.copy(), self.before, [0] * len(self.order))
        return self._best

    def _after(self, i: int, load: np.ndarray, devices: Sequence[int], placed: int) -> np.ndarray:
        """[D] bytes that each device lacks with shard i on top of load [P, D]. inf where it may not be."""
        lacks = (load + self.vectors[i][:, None] - self.may_hold).max(0)
        if self.allowed[i] is not None:
            inside = np.full(len(lacks), np.inf)
            inside[self.allowed[i]] = lacks[self.allowed[i]]
            lacks = inside
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
            device = int(np.where(fits, lacks, -np.inf).argmax() if full and fits.any() else lacks.argmin())
            devices[i], worst = device, max(worst, float(lacks[device]))
            if lacks[device] == np.inf or worst >= most:
                return worst, None
            load[:, device] += self.vectors[i]
        return worst, devices

    def _deepen(self, placed: int, load: np.ndarray, worst: float, devices: list[int]) -> None:
        """Try all packings in turn, the emptiest device first, as far as steps allow."""
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
            load[:, device] -= self.vectors[i]
