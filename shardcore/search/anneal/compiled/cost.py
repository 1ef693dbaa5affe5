"""What a plan costs: exactly, and in the smooth form that annealing minimises.

The smooth form replaces the maximum over devices by a p-norm (Awerbuch et al. 1995, load balancing).
This holds for loads, and for the columns that devices or hosts exchange.
A move changes two devices. So it updates a norm in constant time, whatever the number of devices.

All costs are in ms. Widths are in units of MIN_WIDTH columns.
"""

import math

from numba import njit

from shardcore.compiling import inner
from shardcore.search.anneal.compiled.records import WIDEST, WORST

POWERS = 5
"""log2 of the norm's exponent p. Here p = 32."""


@njit(inline="always")
def power(x):
    """x ** p by repeated squaring."""
    for _ in range(POWERS):
        x *= x
    return x


@njit(inline="always")
def root(x):
    """x ** (1 / p), and 0 for 0 or for a sum that rounding made negative."""
    # Norms are sums of differences, so rounding can leave them just below zero.
    return math.exp(math.log(x) / (1 << POWERS)) if x > 0.0 else 0.0


@njit(inline="always")
def total_of(x):
    """The sum of a vector, by a loop that allocates nothing."""
    total = 0.0
    for i in range(len(x)):
        total += x[i]
    return total


@inner
def copy_norm(to, of):
    """Copy the norms of loads, widths and host widths, [3, K]."""
    for i in range(3):
        for k in range(to.shape[1]):
            to[i, k] = of[i, k]


@inner
def shared_exchange(fx, size):
    """ms of the collectives for tables that groups share. size: [G] what each group exchanges.

    The share that depends on a group's own size is not included. State.own_ms holds it for each device.
    """
    ms = 0.0
    for y in range(len(fx.shared_once)):
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
def load_of(fx, d, shared_ms, own_ms, ms, width):
    """ms of a device: its ops at its speed, and the exchanges that its own widths cause.

    ms: of the ops of its own strips, at speed 1. width: [K] units.
    """
    # Ops scale with the device's speed. Exchanges do not.
    load = (shared_ms + ms) / fx.speed[d] + own_ms
    for k in range(len(width)):
        load += fx.own[k] * width[k]
    return load


@inner
def energy_of(fx, ref, norm, all_width, group_size):
    """The smooth cost in ms. It is `cost_of` with p-norms in place of maxima.

    norm: [3, K] sums of p-th powers, relative to ref.
    all_width: [K] units on all devices.
    group_size: [G] what each group exchanges.
    """
    # Norms are taken of ratios to ref, the means: p-th powers of ms would over- or underflow.
    cost = ref[0, 0] * root(norm[0, 0]) + shared_exchange(fx, group_size)
    for k in range(len(all_width)):
        if all_width[k] > 0:
            cost += fx.once[k] + fx.total[k] * all_width[k] + fx.busiest[k] * ref[1, k] * root(norm[1, k])
            if fx.host_busiest[k] > 0.0:
                cost += fx.host_busiest[k] * ref[2, k] * root(norm[2, k])
    return cost


@inner
def cost_of(fx, st):
    """The exact cost in ms, with maxima. Also notes the slowest and the widest device in st.number."""
    worst = 0
    for d in range(1, len(st.load)):
        if st.load[d] > st.load[worst]:
            worst = d
    st.number[WORST] = worst
    cost = st.load[worst] + shared_exchange(fx, st.group_size)
    for k in range(len(st.all_width)):
        if st.all_width[k] > 0:
            # Where no cost depends on the widest device, the search for it is skipped.
            widest = 0
            if fx.busiest[k] > 0.0:
                for d in range(1, len(st.load)):
                    if st.width[d, k] > st.width[widest, k]:
                        widest = d
            st.number[WIDEST + k] = widest
            cost += fx.once[k] + fx.total[k] * st.all_width[k] + fx.busiest[k] * st.width[widest, k]
            if fx.host_busiest[k] > 0.0:
                # A host's link is shared by its devices: the host that sends most decides.
                most = 0
                for h in range(len(st.hosts)):
                    most = max(most, st.hosts[h, k])
                cost += fx.host_busiest[k] * most
    return cost
