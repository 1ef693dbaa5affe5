"""Cost of a plan: exact, and in the smooth form that annealing minimises.

The smooth form replaces the maximum over devices by a p-norm (Awerbuch et al. 1995, load balancing).
So it does for loads, and for the bytes that devices or hosts exchange.
A move changes two devices. So it updates a norm in constant time, whatever the number of devices.

All costs are in ms. Exchanges carry bytes.
"""

import math

from numba import int64

from shardcore.core.jit import compile_inner
from shardcore.core.step_cost import EQUAL
from shardcore.step.engine.arrays import (
    ARRIVED,
    BUSIEST,
    ENTERED,
    FETCHED,
    HOST_BUSIEST,
    LOAD,
    ONCE,
    OWN,
    SPEED,
    TOTAL,
    WIDEST,
    WORK_BUSIEST,
    WORK_ONCE,
    WORK_TOTAL,
    WORST,
)

POWERS = 5
"""log2 of the norm's exponent p. Here p = 32, as in `norm_power`."""


@compile_inner
def norm_power(x):
    """x ** p, the power in the p-norm of loads, by repeated squaring."""
    x *= x  # x ** 2
    x *= x  # x ** 4
    x *= x  # x ** 8
    x *= x  # x ** 16
    return x * x


@compile_inner
def norm_root(x):
    """x ** (1 / p), the root in the p-norm of loads. 0 for x <= 0, which rounding may give."""
    # Norms are sums of differences, so rounding can leave them just below zero.
    return math.exp(math.log(x) / (1 << POWERS)) if x > 0.0 else 0.0


@compile_inner
def is_less(ms, other):
    """True if a cost is less than another by more than rounding."""
    return ms * (1.0 + EQUAL) < other


@compile_inner
def copy_vector(to, source):
    """Copy a vector in place, without allocating."""
    for i in range(len(to)):
        to[i] = source[i]


@compile_inner
def add_vector(to, source):
    """Add a vector to another in place."""
    for i in range(len(to)):
        to[i] += source[i]


@compile_inner
def device_count(state):
    """The number of devices in a search state."""
    return state.held.shape[1]


@compile_inner
def sum_over_device_ops(state, device, entry):
    """The sum of one entry over the vectors of a device's ops, such as resident bytes."""
    # Callers pass constants as int64: numba compiles a function again for each constant.
    total = 0.0
    for r in range(state.row.shape[1]):
        total += state.ops[state.row[device, r], r, entry]
    return total


@compile_inner
def exchanged_bytes(state, device, exchange):
    """Bytes that a device carries in an exchange: outputs of an op, or its ids."""
    n = state.row.shape[1]
    if exchange < n:
        return state.ops[state.row[device, exchange], exchange, ENTERED]
    return state.ops[state.row[device, exchange - n], exchange - n, ARRIVED]


@compile_inner
def device_load_ms(problem, state, device, row, a):
    """ms of a device's ops at its speed, plus its own share of exchanges for head LOAD.

    row: the row of State.row with its ops.
    a: the head: LOAD or FETCHED.
    """
    ms = exchanges_ms = 0.0
    for r in range(state.row.shape[1]):
        ms += state.ms[state.row[row, r], r, a]
        # Only this device's own part of each exchange. Parts of the busiest or of all are added once a plan.
        if a == LOAD and problem.rates[r, OWN] > 0.0:
            exchanges_ms += problem.rates[r, OWN] * state.ops[state.row[row, r], r, ENTERED]
    # Ops scale with the device's speed. Exchanges do not.
    return ms / problem.devices[device, SPEED] + exchanges_ms


@compile_inner
def exposed_ids_ms(problem, ids_ms, work_ms):
    """ms by which the exchange of ids makes a step longer. work_ms: the part that is never hidden."""
    # The dense part hides the transfer of ids, but never the devices' own work with them.
    return max(work_ms, ids_ms - problem.hides_ids_ms)


@compile_inner
def step_ms_with_fetches(problem, ms, fetched):
    """ms of a step without the dense part and ids; the larger of compute and the fetches of caches."""
    return max(ms, fetched - problem.dense_ms) if len(problem.heads) > 1 else ms


@compile_inner
def depends_on_busiest_device(problem, exchange):
    """Tell if an exchange takes longer the more its busiest device carries."""
    return problem.rates[exchange, BUSIEST] > 0.0 or problem.rates[exchange, WORK_BUSIEST] > 0.0


@compile_inner
def exchange_ms(problem, exchange, total, busiest, of_host):
    """ms of an exchange and of devices' work on its ids, from bytes in total, of the busiest device and of the busiest
    host.
    """
    rates = problem.rates[exchange]
    ms = rates[ONCE] + rates[TOTAL] * total + rates[BUSIEST] * busiest + rates[HOST_BUSIEST] * of_host
    return ms, rates[WORK_ONCE] + rates[WORK_TOTAL] * total + rates[WORK_BUSIEST] * busiest


@compile_inner
def smooth_cost_ms(problem, state, t):
    """The smooth cost of a plan in ms, with p-norms over devices in place of maxima.

    t: 0 for the present plan, 1 for that of a trial.
    """
    # Norms are taken of ratios to ref, the means: p-th powers of ms would over- or underflow.
    norm, all_carried = state.norm[t], state.hosts[t, -1]
    cost, ids_ms, work_ms = state.ref[0, LOAD] * norm_root(norm[0, LOAD]), 0.0, 0.0
    for x in range(len(problem.rates)):
        # An exchange without bytes is not launched, so its fixed cost does not count either.
        if all_carried[x] > 0.0:
            # In bytes again. At least the largest load, and at most D ** (1 / p) times it.
            busiest = (
                state.ref[1, x] * norm_root(norm[1, x]) if depends_on_busiest_device(problem, x) else 0.0
            )
            of_host = state.ref[2, x] * norm_root(norm[2, x]) if problem.rates[x, HOST_BUSIEST] > 0.0 else 0.0
            ms, own_ms = exchange_ms(problem, x, all_carried[x], busiest, of_host)
            # Exchanges of outputs come first. Those of ids may hide behind the dense part.
            if x < len(problem.runs):
                cost += ms
            else:
                ids_ms += ms
                work_ms += own_ms
    fetched = state.ref[0, FETCHED] * norm_root(norm[0, FETCHED])
    return step_ms_with_fetches(problem, cost, fetched) + exposed_ids_ms(problem, ids_ms, work_ms)


@compile_inner
def largest_device(state, column):
    """The device with the largest entry in a column of State.devices; the first among equals."""
    found = 0
    for d in range(1, device_count(state)):
        if is_less(state.devices[found, column], state.devices[d, column]):
            found = d
    return found


@compile_inner
def exact_cost_ms(problem, state):
    """The exact cost of a plan in ms. Also records the slowest and the busiest devices in the state."""
    # A step waits for its slowest device. Moves prefer that one, so it is noted.
    worst, latest = (
        largest_device(state, int64(LOAD)),
        largest_device(state, int64(FETCHED)) if len(problem.heads) > 1 else 0,
    )
    state.number[WORST] = worst
    cost, ids_ms, work_ms = state.devices[worst, LOAD], 0.0, 0.0
    for x in range(len(problem.rates)):
        total = state.hosts[0, -1, x]
        if total > 0.0:
            # Where no cost depends on the busiest device, the search for it is skipped.
            busiest, most = 0, 0.0
            if depends_on_busiest_device(problem, x):
                r, entry = (x, ENTERED) if x < len(problem.runs) else (x - len(problem.runs), ARRIVED)
                for d in range(device_count(state)):
                    n_bytes = state.ops[d, r, entry]
                    if n_bytes > most:
                        busiest, most = d, n_bytes
            # Moves prefer this device, too: only a change there makes the exchange shorter.
            state.number[WIDEST + x] = busiest
            of_host = 0.0
            if problem.rates[x, HOST_BUSIEST] > 0.0:
                # A host's link is shared by its devices: the host that sends most decides.
                for h in range(state.hosts.shape[1] - 1):
                    of_host = max(of_host, state.hosts[0, h, x])
            ms, own_ms = exchange_ms(problem, x, total, most, of_host)
            if x < len(problem.runs):
                cost += ms
            else:
                ids_ms += ms
                work_ms += own_ms
    step = step_ms_with_fetches(problem, cost, state.devices[latest, FETCHED])
    # Where the step waits for rows, less to fetch makes it shorter, so moves prefer that device.
    if step > cost:
        state.number[WORST] = latest
    return step + exposed_ids_ms(problem, ids_ms, work_ms)
