"""Cost of a plan: exact, and in the smooth form that annealing minimises.

The smooth form replaces the maximum over devices by a p-norm (Awerbuch et al. 1995, load balancing).
So it does for loads, and for the bytes that devices or hosts exchange.
A move changes two devices. So it updates a norm in constant time, whatever the number of devices.

All costs are in ms. Exchanges carry bytes.
"""

import math

from shardcore.core.jit import inner
from shardcore.cost.model import EQUAL
from shardcore.search.anneal.compiled.arrays import WIDEST, WORST

POWERS = 5
"""log2 of the norm's exponent p. Here p = 32, as in `power`."""


@inner
def power(x):
    """x ** p by repeated squaring. Written out, as numba takes long over a loop."""
    x *= x  # x ** 2
    x *= x  # x ** 4
    x *= x  # x ** 8
    x *= x  # x ** 16
    return x * x


@inner
def root(x):
    """x ** (1 / p), and 0 for 0 or for a sum that rounding made negative."""
    # Norms are sums of differences, so rounding can leave them just below zero.
    return math.exp(math.log(x) / (1 << POWERS)) if x > 0.0 else 0.0


@inner
def is_less(ms, other):
    """True if a cost of 0 or more is less than another, not just by rounding (cost/model.py)."""
    return ms * (1.0 + EQUAL) < other


@inner
def total_of(x):
    """The sum of a vector, by a loop that allocates nothing."""
    total = 0.0
    for i in range(len(x)):
        total += x[i]
    return total


@inner
def copy(to, source):
    """Copy a vector. A slice assignment would allocate."""
    for i in range(len(to)):
        to[i] = source[i]


@inner
def add(to, source):
    """Add a vector to another."""
    for i in range(len(to)):
        to[i] += source[i]


@inner
def replace(to, was, then):
    """Subtract one vector from another, and add a third."""
    for i in range(len(to)):
        to[i] += then[i] - was[i]


@inner
def copy_norm(to, source):
    """Copy the norms of loads, and of bytes that devices and hosts carry, [3, X]."""
    for i in range(3):
        copy(to[i], source[i])


@inner
def shared_exchange(fx, size):
    """ms of the collectives for tables that groups share. size: [G] bytes that each group exchanges.

    The share that depends on a group's own size is not included. State.own_ms holds it for each device.
    """
    ms = 0.0
    # The collectives of layouts run one after the other.
    for y in range(len(fx.shared_once)):
        # Groups of a layout exchange at the same time: the largest of them counts, and their sum.
        total = most = 0.0
        for g in range(len(size)):
            if fx.group_layout[g] == y:
                total += size[g]
                most = max(most, size[g])
        # A collective with nothing to exchange does not run, so it has no fixed cost.
        if total > 0.0:
            ms += fx.shared_once[y] + fx.shared_total[y] * total + fx.shared_busiest[y] * most
    return ms


@inner
def load_of(fx, d, shared_ms, own_ms, ms, carried):
    """ms of a device: its ops at its speed, and the exchanges that its own loads cause.

    ms: of the ops of its own strips, at speed 1. carried: [X].
    """
    # Ops scale with the device's speed. Exchanges do not.
    load = (shared_ms + ms) / fx.speed[d] + own_ms
    # Only this device's own part of each exchange. Parts of the busiest or of all are added once a plan.
    for x in range(len(carried)):
        load += fx.own[x] * carried[x]
    return load


@inner
def exposed_ids(fx, ids_ms, work_ms):
    """ms that ids add to a step. work_ms: the share of ids_ms that nothing hides."""
    # The dense part hides the transfer of ids, but never the devices' own work with them.
    return max(work_ms, ids_ms - fx.hides_ids_ms)


@inner
def longer_chain(fx, ms, fetched):
    """ms of a step without the dense part and ids; fetches and updates may set it (model.fetch_wait_ms)."""
    return max(ms, fetched - fx.dense_ms) if len(fx.fetched) > 0 else ms


@inner
def energy_of(fx, ref, norm, all_carried, group_size):
    """The smooth cost in ms. It is `cost_of` with p-norms in place of maxima.

    norm: [3, X] sums of p-th powers, relative to ref.
    all_carried: [X] of all devices.
    group_size: [G] bytes that each group exchanges.
    """
    # Norms are taken of ratios to ref, the means: p-th powers of ms would over- or underflow.
    cost = ref[0, 0] * root(norm[0, 0]) + shared_exchange(fx, group_size)
    fetched = ref[0, 1] * root(norm[0, 1])
    ids_ms = work_ms = 0.0
    for x in range(len(all_carried)):
        # An exchange without bytes is not launched, so its fixed cost does not count either.
        if all_carried[x] > 0:
            # In bytes again. At least the largest load, and at most D ** (1 / p) times it.
            busiest = ref[1, x] * root(norm[1, x])
            ms = fx.once[x] + fx.total[x] * all_carried[x] + fx.busiest[x] * busiest
            if fx.host_busiest[x] > 0.0:
                ms += fx.host_busiest[x] * ref[2, x] * root(norm[2, x])
            # Exchanges of outputs come first. Those of ids may hide behind the dense part.
            if x < len(fx.ids_by):
                cost += ms
            else:
                ids_ms += ms
                work_ms += fx.work_once[x] + fx.work_total[x] * all_carried[x] + fx.work_busiest[x] * busiest
    return longer_chain(fx, cost, fetched) + exposed_ids(fx, ids_ms, work_ms)


@inner
def cost_of(fx, st):
    """The exact cost in ms, with maxima. Also notes the slowest and the busiest devices in st.number."""
    # A step waits for its slowest device. Moves prefer that one, so it is noted.
    worst = 0
    for d in range(1, len(st.load)):
        if is_less(st.load[worst], st.load[d]):
            worst = d
    st.number[WORST] = worst
    cost = st.load[worst] + shared_exchange(fx, st.group_size)
    latest = 0
    if len(fx.fetched) > 0:
        for d in range(1, len(st.fetched)):
            if is_less(st.fetched[latest], st.fetched[d]):
                latest = d
    ids_ms = work_ms = 0.0
    for x in range(len(st.all_carried)):
        if st.all_carried[x] > 0:
            # Where no cost depends on the busiest device, the search for it is skipped.
            busiest = 0
            if fx.busiest[x] > 0.0 or fx.work_busiest[x] > 0.0:
                for d in range(1, len(st.load)):
                    if st.carried[d, x] > st.carried[busiest, x]:
                        busiest = d
            # Moves prefer this device, too: only a change there makes the exchange shorter.
            st.number[WIDEST + x] = busiest
            ms = fx.once[x] + fx.total[x] * st.all_carried[x] + fx.busiest[x] * st.carried[busiest, x]
            if fx.host_busiest[x] > 0.0:
                # A host's link is shared by its devices: the host that sends most decides.
                most = 0
                for h in range(len(st.hosts)):
                    most = max(most, st.hosts[h, x])
                ms += fx.host_busiest[x] * most
            if x < len(fx.ids_by):
                cost += ms
            else:
                ids_ms += ms
                work_ms += (
                    fx.work_once[x]
                    + fx.work_total[x] * st.all_carried[x]
                    + fx.work_busiest[x] * st.carried[busiest, x]
                )
    # Where the step waits for rows, less to fetch makes it shorter, so moves prefer that device.
    if longer_chain(fx, cost, st.fetched[latest]) > cost:
        st.number[WORST] = latest
    return longer_chain(fx, cost, st.fetched[latest]) + exposed_ids(fx, ids_ms, work_ms)
