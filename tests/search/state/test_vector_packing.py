"""Packings of vectors, compared with all possible ones."""

from itertools import product

import numpy as np

from shardcore.search.state.vector_packing import VectorPacking
from shardcore.step.kinds import WHOLE_ROWS
from shardcore.step.memory import Caches
from shardcore.step.memory_account import Account

NO_CACHES = Caches({})


def account_of(limits: np.ndarray, base: np.ndarray) -> Account:
    coefficients, sent = np.zeros((0, 6, len(base))), np.zeros(len(base))
    return Account(None, {}, base, coefficients, sent, limits, len(base))


def test_a_packing_is_found_wherever_there_is_one_and_what_is_lacking_is_the_least():
    rng, found_some = np.random.default_rng(0), 0
    for _ in range(200):
        n_items, n_devices, n_phases = (int(rng.integers(1, most)) for most in (6, 5, 4))
        vectors = rng.integers(1, 7, (n_items, n_phases)).astype(float)
        may_hold = rng.integers(4, 14, (n_devices, 1)).repeat(n_phases, 1).astype(float)
        base = rng.integers(0, 3, n_phases).astype(float)
        some = [tuple({*rng.integers(n_devices, size=2).tolist()}) for _ in range(n_items)]
        allowed = [tuple(range(n_devices)) if rng.random() < 0.5 else of for of in some]
        # The first two are of one table.
        names = ["t", "t", *map(str, range(2, n_items))][:n_items]

        # A third of them have a cache that is 1 or 3 columns wide. Counts: bytes; rows; shards of each width.
        caches = Caches({(WHOLE_ROWS, "fp32"): (1, (1, 3))}) if rng.random() < 1 / 3 else NO_CACHES
        widths = rng.integers(0, 2, n_items)
        counts = np.stack([np.zeros(n_items), np.full(n_items, 32.0), widths == 0, widths == 1], 1)
        vectors = np.append(vectors * 600, counts, 1) if len(caches) else vectors
        may_hold, base = (x * (600 if len(caches) else 1) for x in (may_hold, base))

        def lacks(devices, vectors=vectors, may_hold=may_hold, base=base, names=names, caches=caches):
            if names[1:2] == ["t"] and devices[0] == devices[1]:
                return np.inf
            total = np.zeros((len(may_hold), vectors.shape[1]))
            np.add.at(total, list(devices), vectors)
            n_bytes = base + total[:, : len(base)]
            n_bytes += caches.padding(total[:, len(base) :])[:, None] if len(caches) else 0.0
            return max((n_bytes - may_hold)[list(devices)].max(1))

        least = min(map(lacks, product(*allowed)))
        nothing = np.zeros((n_devices, vectors.shape[1]))
        packing = VectorPacking(account_of(may_hold, base), caches, nothing, vectors, allowed, names)
        lacking, devices = packing.best(np.inf)
        if least <= 0:
            assert devices is not None and lacks(devices) <= 0 and lacking <= 0
            found_some += 1
        elif least < np.inf:
            assert lacks(devices) == lacking == least
        else:
            assert devices is None
    assert 50 < found_some < 150


def test_many_alike_fill_devices_to_the_last():
    ones, room = np.ones((500, 2)), np.full((5, 2), 100.0)
    anywhere, names = [tuple(range(5))] * 500, list(map(str, range(500)))
    nothing = np.zeros((5, 2))

    def best(each: np.ndarray):
        account = account_of(each, np.zeros(2))
        return VectorPacking(account, NO_CACHES, nothing, ones, anywhere, names).best(np.inf)

    lacks, devices = best(room)
    assert lacks == 0 and np.bincount(devices).tolist() == [100] * 5
    assert best(room - 1)[0] > 0
