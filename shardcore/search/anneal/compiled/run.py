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
def anneal(head, problem_words, state_words, trials, hot_ms, cold_ms):
    """Try `trials` moves while the temperature falls from hot_ms to cold_ms. With 0 trials, the same as
    `refresh_state`.

    Returns the exact cost of the best plan met, in ms.
    """
    problem, state = problem_at(problem_words), state_at(state_words)
    if trials == 0:
        undo_logged_changes(problem, state, int64(0))
        recompute_state(head, problem, state)
        state.value[BEST] = exact_cost_ms(problem, state)
    # A change of a group costs time for each device, and there are fewer such changes.
    often = min(SHARED_TRIALS, 2.0 / device_count(state)) if problem.may_share.any() else 0.0
    # Geometric cooling: a constant factor for each trial.
    temperature, cooling = hot_ms, (cold_ms / hot_ms) ** (1.0 / max(trials, 1))
    for _ in range(trials):
        temperature *= cooling
        # Metropolis' rule. The random number is drawn first, so that one comparison decides.
        threshold = state.value[ENERGY] - temperature * math.log(max(draw_uniform(state), 1e-300))
        if often > 0.0 and draw_uniform(state) < often:
            if not try_shared_move(head, problem, state, threshold):
                continue
        else:
            a, b, n = propose_move(problem, state)
            if n == 0:
                continue
            energy = price_edits(head, problem, state, a, b, n)
            if energy >= threshold or not edits_fit(problem, state, a, b, n):
                continue
            accept_edits(problem, state, a, b, n)
            state.value[ENERGY] = energy
        # Moves follow the smooth energy; the best plan is chosen by the exact cost.
        cost = exact_cost_ms(problem, state)
        if is_less(cost, state.value[BEST]):
            state.value[BEST] = cost
            # The log leads back to the best plan, which is now the present one.
            state.number[LOG] = 0
        elif state.number[LOG] + MOST_EDITS > len(
            state.log
        ):  # the log is full: start again from the best plan
            undo_logged_changes(problem, state, int64(0))
            recompute_state(head, problem, state)
            exact_cost_ms(problem, state)
    return state.value[BEST]


def refresh_state(head: Any, problem: Any, state: Any) -> float:
    """Recompute a state's derived values from `held` and `group`. Returns the plan's cost in ms.

    After annealing, goes back to the best plan met first, by the log. Only the state annealed last may have one.
    """
    # Not a compiled function of its own: it would compile most of `anneal` again.
    return anneal(head, problem, state, 0, 1.0, 1.0)
