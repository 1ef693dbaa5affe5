"""The loop of simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983)."""

import math
from typing import Any

from numba import float64, int64

from shardcore.search.anneal.compiled.moves import draw_uniform, propose_move, try_shared_move
from shardcore.step.engine.arrays import BEST, ENERGY, HEAD, LOG, MOST_EDITS, problem_at, state_at
from shardcore.step.engine.cost import device_count, exact_cost_ms, is_less
from shardcore.step.engine.pointers import WORDS, entry
from shardcore.step.engine.state import recompute_state, undo_logged_changes
from shardcore.step.engine.trial import accept_edits, edits_fit, price_edits

SHARED_TRIALS = 0.1
"""Share of the trials that change what groups share."""


@entry(float64(HEAD, WORDS, WORDS, int64, float64, float64))
def anneal(head, problem, state, trials, hot_ms, cold_ms):
    """Try `trials` moves while the temperature falls from hot_ms to cold_ms. With 0 trials, the same as
    `refresh_state`.

    Returns the exact cost of the best plan met, in ms.
    """
    fx, st = problem_at(problem), state_at(state)
    if trials == 0:
        undo_logged_changes(fx, st, int64(0))
        recompute_state(head, fx, st)
        st.value[BEST] = exact_cost_ms(fx, st)
    # A change of a group costs time for each device, and there are fewer such changes.
    often = min(SHARED_TRIALS, 2.0 / device_count(st)) if fx.may_share.any() else 0.0
    # Geometric cooling: a constant factor for each trial.
    temperature, cooling = hot_ms, (cold_ms / hot_ms) ** (1.0 / max(trials, 1))
    for _ in range(trials):
        temperature *= cooling
        # Metropolis' rule. The random number is drawn first, so that one comparison decides.
        threshold = st.value[ENERGY] - temperature * math.log(max(draw_uniform(st), 1e-300))
        if often > 0.0 and draw_uniform(st) < often:
            if not try_shared_move(head, fx, st, threshold):
                continue
        else:
            a, b, n = propose_move(fx, st)
            if n == 0:
                continue
            energy = price_edits(head, fx, st, a, b, n)
            if energy >= threshold or not edits_fit(fx, st, a, b, n):
                continue
            accept_edits(fx, st, a, b, n)
            st.value[ENERGY] = energy
        # Moves follow the smooth energy; the best plan is chosen by the exact cost.
        cost = exact_cost_ms(fx, st)
        if is_less(cost, st.value[BEST]):
            st.value[BEST] = cost
            # The log leads back to the best plan, which is now the present one.
            st.number[LOG] = 0
        elif st.number[LOG] + MOST_EDITS > len(st.log):  # the log is full: start again from the best plan
            undo_logged_changes(fx, st, int64(0))
            recompute_state(head, fx, st)
            exact_cost_ms(fx, st)
    return st.value[BEST]


def refresh_state(head: Any, problem: Any, state: Any) -> float:
    """Recompute a state's derived values from `held` and `group`. Returns the plan's cost in ms.

    After annealing, goes back to the best plan met first, by the log. Only the state annealed last may have one.
    """
    # Not a compiled function of its own: it would compile most of `anneal` again.
    return anneal(head, problem, state, 0, 1.0, 1.0)
