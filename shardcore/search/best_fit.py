"""Best fit with backtracking: devices for bundles of given sizes.

Shapes: D devices.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np


def best_fit(sizes: Sequence[int], free: Sequence[int], nodes: int,
             allowed: Sequence[tuple[int, ...] | None] = ()) -> tuple[list[int] | None, bool]:
    """Devices for bundles: each goes to the fullest device that takes it. At a dead end, backtrack.

    sizes: bytes of each bundle.
    free: [D] bytes.
    nodes: the most steps of the depth-first search.
    allowed: for each bundle the devices it may go to; None or an empty sequence for all.

    A state is (next bundle, sorted free bytes), and is entered only once.
    Devices with equal bytes are the same if the remaining bundles may use both.
    Returns the devices or None, and whether that is certain. It is not if the steps ran out.
    """
    if not any(allowed):
        # Without constraints, try the first path in O(n log n) before the full search.
        straight = _first_fits(sizes, free)
        if straight is not None or len(sizes) > nodes:
            return straight, straight is not None
    n = len(free)
    # Remedies are sought with more memory than int64 can count.
    left = np.array(free, dtype=np.int64 if max(free, default=0) < (1 << 62) // max(1, n) else object)
    everywhere, devices = np.arange(n), []
    seen: set[bytes] = set()
    alike = _alike(allowed, n)

    def keys(i: int) -> np.ndarray:
        """[D] sort devices by room, then by class. Equal ones are alike to bundles from i on."""
        return left * n + alike[i]

    def options(i: int) -> Iterator[int]:
        """Devices for bundle i, the fullest first. Of devices that are alike to later ones, one will do."""
        where = everywhere if not allowed or allowed[i] is None else np.array(allowed[i])
        where = where[left[where] >= sizes[i]]
        key = keys(i + 1)[where]
        if len(where):
            # Mostly the first is all that is asked for. To find it is faster than to sort.
            yield int(where[key.argmin()])
            yield from where[np.unique(key, return_index=True)[1][1:]].tolist()

    def state() -> bytes:
        """A digest of the bundles placed and of the room that is left, whichever device has it."""
        found = np.sort(keys(len(devices)))
        content = repr(found.tolist()).encode() if found.dtype == object else found.tobytes()
        return hashlib.blake2b(content + len(devices).to_bytes(4, "little"), digest_size=16).digest()

    levels = [options(0)] if sizes else []
    while levels and nodes > 0:
        if len(devices) == len(levels):  # back from below: undo
            left[devices[-1]] += sizes[len(devices) - 1]
            devices.pop()
        device = next(levels[-1], None)
        if device is None:
            levels.pop()
            continue
        nodes -= 1
        left[device] -= sizes[len(devices)]
        devices.append(device)
        if len(devices) == len(sizes):
            return devices, True
        if (now := state()) not in seen:
            seen.add(now)
            levels.append(options(len(devices)))
    return ([], True) if not sizes else (None, not levels)


def _first_fits(sizes: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """The path that best fit tries first, found quickly. None if it leads to a dead end."""
    gaps, devices = sorted(zip(free, range(len(free)), strict=True)), []
    for size in sizes:
        i = bisect_left(gaps, (size, -1))
        if i == len(gaps):
            return None
        left, device = gaps.pop(i)
        insort(gaps, (left - size, device))
        devices.append(device)
    return devices


def _alike(allowed: Sequence[tuple[int, ...] | None], n_devices: int) -> Sequence[np.ndarray]:
    """[D] for bundles from i on the class of each device: devices of one class are alike to them."""
    classes = np.zeros(n_devices, dtype=np.int64)
    if not any(allowed):
        return defaultdict(lambda: classes)
    result, met = [classes], set()
    # Going backwards, each new constraint splits the classes into inside and outside.
    for devices in reversed(allowed):
        if devices is not None and devices not in met:
            met.add(devices)
            inside = np.zeros(n_devices, dtype=np.int64)
            inside[list(devices)] = 1
            _, first, split = np.unique(2 * classes + inside, return_index=True, return_inverse=True)
            # Numbered by their first devices.
            classes = np.argsort(np.argsort(first))[split]
        result.append(classes)
    return result[::-1]
