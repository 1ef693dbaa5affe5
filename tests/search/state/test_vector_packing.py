"""Packings of vectors, compared with all that there are."""

from itertools import product

import numpy as np

from shardcore.search.state.vector_packing import VectorPacking


def test_a_packing_is_found_wherever_there_is_one_and_what_is_lacking_is_the_least():
    rng, found_some = np.random.default_rng(0), 0
    for _ in range(200):
        n_items, n_devices, n_phases = (int(rng.integers(1, most)) for most in (6, 5, 4))
        vectors = rng.integers(1, 7, (n_items, n_phases)).astype(float)
        may_hold = rng.integers(4, 14, (n_devices, 1)).repeat(n_phases, 1).astype(float)
        load = np.tile(rng.integers(0, 3, n_phases).astype(float), (n_devices, 1))
        some = [tuple({*rng.integers(n_devices, size=2).tolist()}) for _ in range(n_items)]
        allowed = [tuple(range(n_devices)) if rng.random() < 0.5 else of for of in some]
        # The first two are of one table.
        names = ["t", "t", *map(str, range(2, n_items))][:n_items]

        def lacks(devices, vectors=vectors, may_hold=may_hold, load=load, names=names):
            if names[1:2] == ["t"] and devices[0] == devices[1]:
                return np.inf
            total = load.copy()
            np.add.at(total, list(devices), vectors)
            return max((total - may_hold)[list(devices)].max(1))

        least = min(map(lacks, product(*allowed)))
        packing = VectorPacking(may_hold, load, False, vectors, allowed, names)
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
    lacks, devices = VectorPacking(room, np.zeros((5, 2)), False, ones, anywhere, names).best(np.inf)
    assert lacks == 0 and np.bincount(devices).tolist() == [100] * 5
    assert VectorPacking(room - 1, np.zeros((5, 2)), False, ones, anywhere, names).best(np.inf)[0] > 0
