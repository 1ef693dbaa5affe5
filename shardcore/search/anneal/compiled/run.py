"""The loop of simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983)."""

import math
from typing import Any

from numba import float64, int64

from shardcore.search.anneal.compiled.moves import change_shared, propose, uniform
from shardcore.step.engine.arrays import BEST, ENERGY, HEAD, LOG, MOST_EDITS, problem_at, state_at
from shardcore.step.engine.cost import cost_of, is_less, n_devices_of
from shardcore.step.engine.pointers import WORDS, entry
from shardcore.step.engine.state import recompute, undo
from shardcore.step.engine.trial import accept, fits, try_edits

SHARED_TRIALS = 0.1
"""Share of the trials that change what groups share."""


@entry(float64(HEAD, WORDS, WORDS, int64, float64, float64))
def anneal(head, problem, state, trials, hot_ms, cold_ms):
    """Try `trials` moves while the temperature falls from hot_ms to cold_ms. With no trials, see `refresh`.

    Returns the exact cost of the best plan met, in ms.
    """
    fx, st = problem_at(problem), state_at(state)
    if trials == 0:
        undo(fx, st, int64(0))
        recompute(head, fx, st)
        st.value[BEST] = cost_of(fx, st)
    # A change of a group costs time for each device, and there are fewer such changes.
    often = min(SHARED_TRIALS, 2.0 / n_devices_of(st)) if fx.may_share.any() else 0.0
    # Geometric cooling: a constant factor for each trial.
    temperature, cooling = hot_ms, (cold_ms / hot_ms) ** (1.0 / max(trials, 1))
    for _ in range(trials):
        temperature *= cooling
        # Metropolis' rule. The random number is drawn first, so that one comparison decides.
        threshold = st.value[ENERGY] - temperature * math.log(max(uniform(st), 1e-300))
        if often > 0.0 and uniform(st) < often:
            if not change_shared(head, fx, st, threshold):
                continue
        else:
            a, b, n = propose(fx, st)
            if n == 0:
                continue
            energy = try_edits(head, fx, st, a, b, n)
            if energy >= threshold or not fits(fx, st, a, b, n):
                continue
            accept(fx, st, a, b, n)
            st.value[ENERGY] = energy
        # Moves follow the smooth energy; the best plan is chosen by the exact cost.
        cost = cost_of(fx, st)
        if is_less(cost, st.value[BEST]):
            st.value[BEST] = cost
            # The log leads back to the best plan, which is now the present one.
            st.number[LOG] = 0
        elif st.number[LOG] + MOST_EDITS > len(st.log):  # the log is full: start again from the best plan
            undo(fx, st, int64(0))
            recompute(head, fx, st)
            cost_of(fx, st)
    return st.value[BEST]


def refresh(head: Any, problem: Any, state: Any) -> float:
    """Compute everything that follows from `held` and `group`. Returns the plan's cost in ms.

    After annealing, goes back to the best plan met first, by the log. Only the state annealed last may have one.
    """
    # Not a compiled function of its own: it would compile most of `anneal` again.
    return anneal(head, problem, state, 0, 1.0, 1.0)
