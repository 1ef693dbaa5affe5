"""What a plan costs, as it is and in the smooth form that the search makes small.

The smooth form has the p-norm of the devices' loads instead of their maximum, and likewise of the columns that a device, or a
host, exchanges (as in load balancing, Awerbuch et al. 1995). A change alters two devices, so its effect on the norms takes as
long however many there are.
"""

import math

from numba import njit

from shardcore.compiling import inner
from shardcore.search.anneal.compiled.records import WIDEST, WORST

POWERS = 5
"""log2 of the norm's p."""


@njit(inline="always")
def power(x):
    for _ in range(POWERS):
        x *= x
    return x


@njit(inline="always")
def root(x):
    return math.exp(math.log(x) / (1 << POWERS)) if x > 0.0 else 0.0


@njit(inline="always")
def total_of(x):
    total = 0.0
    for i in range(len(x)):
        total += x[i]
    return total


@inner
def copy_norm(to, of):
    for i in range(3):
        for k in range(to.shape[1]):
            to[i, k] = of[i, k]


@inner
def shared_exchange(fx, size):
    """ms of the exchanges of what groups share, from their sizes [G], but for what each group's own decides."""
    ms = 0.0
    for y in range(len(fx.shared_once)):
        total = most = 0.0
        for g in range(len(size)):
            if fx.group_layout[g] == y:
                total += size[g]
                most = max(most, size[g])
        if total > 0.0:
            ms += fx.shared_once[y] + fx.shared_total[y] * total + fx.shared_busiest[y] * most
    return ms


@inner
def load_of(fx, d, shared_ms, own_ms, ms, width):
    load = (shared_ms + ms) / fx.speed[d] + own_ms
    for k in range(len(width)):
        load += fx.own[k] * width[k]
    return load


@inner
def energy_of(fx, ref, norm, all_width, group_size):
    """The smooth cost from the norms, the units of width in all, of each kind, and the sizes of what groups share."""
    cost = ref[0, 0] * root(norm[0, 0]) + shared_exchange(fx, group_size)
    for k in range(len(all_width)):
        if all_width[k] > 0:
            cost += fx.once[k] + fx.total[k] * all_width[k] + fx.busiest[k] * ref[1, k] * root(norm[1, k])
            if fx.host_busiest[k] > 0.0:
                cost += fx.host_busiest[k] * ref[2, k] * root(norm[2, k])
    return cost


@inner
def cost_of(fx, st):
    """The cost as it is, with maxima; sets the devices that are last and widest."""
    worst = 0
    for d in range(1, len(st.load)):
        if st.load[d] > st.load[worst]:
            worst = d
    st.number[WORST] = worst
    cost = st.load[worst] + shared_exchange(fx, st.group_size)
    for k in range(len(st.all_width)):
        if st.all_width[k] > 0:
            widest = 0
            if fx.busiest[k] > 0.0:
                for d in range(1, len(st.load)):
                    if st.width[d, k] > st.width[widest, k]:
                        widest = d
            st.number[WIDEST + k] = widest
            cost += fx.once[k] + fx.total[k] * st.all_width[k] + fx.busiest[k] * st.width[widest, k]
            if fx.host_busiest[k] > 0.0:
                most = 0
                for h in range(len(st.hosts)):
                    most = max(most, st.hosts[h, k])
                cost += fx.host_busiest[k] * most
    return cost
