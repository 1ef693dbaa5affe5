"""The records that the compiled search works on: a problem as arrays, and a plan with room to try changes in.

Shapes: S strips, U most units, R parts, F features, D devices, H hosts, P parameters, L log; K kinds of what devices hold, Y
layouts of what groups of devices share, G groups. Empty arrays, with no rows, stand for what does not apply.
"""

from typing import NamedTuple

import numba
import numpy as np
from numba import boolean, float64, int16, int32, int64, uint64

HEAD = numba.types.FunctionType(float64(float64[::1], float64[::1]))
"""The type of every model's compiled head, so that the search is compiled once for all models."""
MOST_EDITS = 24
"""Of one change."""


class SearchProblem(NamedTuple):
    """What a search does not change. The annotations are numba's types."""

    part: int32[:, ::1]  # [S, U + 1] the part that so many units of a strip are, 0 for none
    codes: float64[:, ::1]  # [R, F] encoding of a part
    added_ms: float64[::1]  # [R] what a part adds to an op
    part_bytes: int64[::1]  # [R]
    part_width: int64[::1]  # [R] units of width
    kind: int64[::1]  # [S]
    size: int64[::1]  # [S] units in all
    table: int64[::1]  # [S] number of its table
    may_split: boolean[::1]  # [S]
    allowed: boolean[:, ::1]  # [S, D] where a strip may live; no rows: on any device
    free: int64[::1]  # [D] bytes
    speed: float64[::1]  # [D]
    host: int64[::1]  # [D]
    own: float64[::1]  # [K] ms of both exchanges for each unit of width of the device itself,
    busiest: float64[::1]  # [K] of the device with most,
    host_busiest: float64[::1]  # [K] of the host with most,
    total: float64[::1]  # [K] of all devices,
    once: float64[::1]  # [K] and if there is any
    group_layout: int64[::1]  # [G] number of each group's layout
    group_of: int64[:, ::1]  # [Y, D] the group of each device, in each layout; -1: none
    may_share: boolean[:, ::1]  # [Y, S] which strips groups may share
    shared_codes: float64[:, :, ::1]  # [Y, S, F] what each device of a group then has of it
    shared_bytes: int64[:, ::1]  # [Y, S]
    shared_size: float64[:, ::1]  # [Y, S] what it exchanges; whole numbers
    shared_own: float64[::1]  # [Y] ms of both exchanges for each of these of the group itself,
    shared_busiest: float64[::1]  # [Y] of the group with most,
    shared_total: float64[::1]  # [Y] of all groups,
    shared_once: float64[::1]  # [Y] and if there is any
    kept: int16[:, ::1]  # [S, D] units of the plan to start from; no rows: none
    weight: int64[::1]  # [S] bytes of a unit
    most_moved: int64[::1]  # [2] tables and bytes that may come to devices that did not have them
    parameters: float64[::1]  # [P] of the head
    halves: boolean  # whether columns are only cut in halves


class State(NamedTuple):
    """One plan, and the room to try a change in. trial_*: the same after a change, of its two devices."""

    held: int16[:, ::1]  # [S, D] units
    count: int64[::1]  # [D] strips that a device holds,
    items: int32[:, ::1]  # [D, S] and which
    sums: float64[:, :, ::1]  # [D, K, F] of codes
    ms: float64[:, ::1]  # [D, K] of ops
    width: int64[:, ::1]  # [D, K]
    used: int64[::1]  # [D] bytes
    load: float64[::1]  # [D] ms
    hosts: int64[:, ::1]  # [H, K] width
    all_width: int64[::1]  # [K] width of all devices
    norm: float64[:, ::1]  # [3, K] sums of p-th powers of loads (in [0, 0]), widths and hosts' widths, over ref
    ref: float64[:, ::1]  # [3, K]
    group: int64[::1]  # [S] the group that shares a strip; -1: none
    shared: int64[::1]  # [S] those that one does
    group_sums: float64[:, ::1]  # [G, F] of codes
    group_ms: float64[::1]  # [G] of a device's op
    group_size: float64[::1]  # [G] what is exchanged
    group_bytes: int64[::1]  # [G] that each of its devices holds
    shared_ms: float64[::1]  # [D] ops of what its groups share
    own_ms: float64[::1]  # [D] exchanges of what its groups share, as far as these decide
    moved: int64[::1]  # [S] bytes of tables
    trial_sums: float64[:, :, ::1]  # [2, K, F]
    trial_ms: float64[:, ::1]  # [2, K]
    trial_width: int64[:, ::1]  # [2, K]
    trial_used: int64[::1]  # [2]
    trial_load: float64[::1]  # [2]
    trial_all_width: int64[::1]  # [K]
    trial_norm: float64[:, ::1]  # [3, K]
    trial_group_sums: float64[:, ::1]  # [2, F] of the groups that a change concerns
    trial_group_ms: float64[::1]  # [2]
    trial_group_size: float64[::1]  # [G]
    edit: int64[:, ::1]  # [MOST_EDITS, 3] a change: strip, device, units then
    log: int32[:, ::1]  # [L, 3] what was done since the best plan: strip, device (-1: a group), units (group) before
    number: int64[::1]  # see LOG
    value: float64[::1]  # see BEST
    random: uint64[::1]  # [1]


LOG, WORST, N_MOVED, BYTES_MOVED, N_SHARED, WIDEST = range(6)
"""Of State.number: entries of the log; the device that is last; tables, and bytes, moved; strips that groups share; and, from
WIDEST on, the widest device of each kind."""
BEST, ENERGY = range(2)
"""Of State.value: cost of the best plan met, in ms; the smooth cost of the present one."""


def empty(problem: SearchProblem, n_hosts: int, log_length: int, seed: int) -> State:
    """An empty plan."""
    (n_strips, _), n_devices, n_features = problem.part.shape, len(problem.free), problem.codes.shape[1]
    n_kinds, n_groups = len(problem.own), len(problem.group_layout)
    shapes = {
        "held": (n_strips, n_devices), "count": n_devices, "items": (n_devices, n_strips),
        "sums": (n_devices, n_kinds, n_features), "ms": (n_devices, n_kinds), "width": (n_devices, n_kinds), "used": n_devices,
        "load": n_devices, "hosts": (n_hosts, n_kinds), "all_width": n_kinds, "norm": (3, n_kinds), "ref": (3, n_kinds),
        "group": n_strips, "shared": n_strips, "group_sums": (n_groups, n_features), "group_ms": n_groups,
        "group_size": n_groups, "group_bytes": n_groups, "shared_ms": n_devices, "own_ms": n_devices,
        "moved": n_strips, "trial_sums": (2, n_kinds, n_features), "trial_ms": (2, n_kinds), "trial_width": (2, n_kinds),
        "trial_used": 2, "trial_load": 2, "trial_all_width": n_kinds, "trial_norm": (3, n_kinds),
        "trial_group_sums": (2, n_features), "trial_group_ms": 2, "trial_group_size": n_groups, "edit": (MOST_EDITS, 3),
        "log": (log_length, 3), "number": WIDEST + n_kinds, "value": 2, "random": 1}
    found = State(**{name: np.zeros(shapes[name], State.__annotations__[name].dtype.name) for name in State._fields})
    found.ref[:], found.group[:], found.value[:] = 1.0, -1, np.inf
    found.random[0] = (seed * 2654435769 + 88172645463325252) % 2**64 or 1
    return found


PROBLEM = numba.types.NamedTuple([SearchProblem.__annotations__[name] for name in SearchProblem._fields], SearchProblem)
STATE = numba.types.NamedTuple([State.__annotations__[name] for name in State._fields], State)
