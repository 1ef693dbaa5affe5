"""All searches by name (SHARDERS), with one signature. LEARNED: the searches that need a trained policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from types import NoneType
from typing import Any, Protocol

from shardcore.core.errors import ShardCoreError
from shardcore.core.gc_pause import infrequent_gc
from shardcore.core.progress import stopped_clock
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import MOST_SEED, require, require_type
from shardcore.cost.model import CostModel, require_model, with_predicted_dense_ms
from shardcore.search import greedy, neuroshard
from shardcore.search.beam import TABLE_WISE, BeamConfig
from shardcore.search.budget import Budget
from shardcore.search.learned.policy import NETS, Policy, place_with_policy
from shardcore.search.memory_balance import balance_memory
from shardcore.search.portfolio import search_with_annealing, search_with_portfolio
from shardcore.search.state.shards import CONCESSION


class Sharder(Protocol):
    """A search: finds a plan for a problem under a cost model. shardcore.testing checks what it has to keep.

    problem: tables, devices and constraints.
    model: costs, as its `for_problem` gives for this problem.
    seed: of all random choices. With a budget in evaluations the same seed gives the same plan.
    budget: limit of the search. None: the sharder's own end.

    The plan's provenance has "algorithm", "seed" and "predicted_ms".
    Raises Infeasible, naming what does not fit and what would help.
    Raises SettingMismatch for a model of another setting.
    """

    def __call__(
        self, problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None
    ) -> Plan: ...


DEFAULT_SHARDER = "portfolio"
SPACE_OF = {"portfolio": "all", "anneal": "all", "anneal_columns": "columns"}
"""The space of each sharder that anneals (see anneal.sharder.SPACES)."""
_TORCHREC = "shardcore.torchrec.baseline"
"""TorchRec's own planner. It knows TorchRec's formats, so it lives above, and is imported when it runs."""
BASELINES = ("random", *greedy.ORDERS)
"""Sharders without a search. Published plans are shown against these."""


_SIMPLIFYING = 0.05
"""Share of a budget in seconds that making a plan simpler has, and trials for it, relative to the search's."""


def _checked_search(search: Callable[..., Plan], balanced: bool = False) -> Sharder:
    """Sharder that checks its arguments' types, limits garbage collection, and simplifies the plan found.

    balanced: whether that has fewer bytes on the fullest device, too, not only fewer parts.
    """

    @wraps(search)
    def checked_search(
        problem: Problem, model: CostModel, *, seed: int = 0, budget: Budget | None = None, **options: Any
    ) -> Plan:
        require_type(problem, Problem, "problem", "a Problem")
        require_model(model)
        require_type(budget, (Budget, NoneType), "budget", "a Budget, such as Budget(evals=10_000), or None")
        require_type(seed, int, "seed", "a whole number")
        require(0 <= seed <= MOST_SEED, f"seed is {seed}; it needs to be 0 to {MOST_SEED}")
        problem = with_predicted_dense_ms(problem, model)
        # Searches make millions of objects, and collections of garbage would look at all of them.
        with infrequent_gc():
            meter = (budget or Budget()).start()
            if budget and budget.seconds:
                budget = replace(budget, seconds=(1 - _SIMPLIFYING) * budget.seconds)
            meter.evals = round((1 - _SIMPLIFYING) * (meter.budget.evals or 0))
            plan = search(problem, model, seed=seed, budget=budget, **options)
            limit_ms = (1 + CONCESSION) * plan.provenance["predicted_ms"]
            # There may be no parts to join, and annealing cuts no tables that devices share.
            if len(plan.placements) > len(problem.tables) and not any(
                len(p.devices) > 1 and p.shard.width < p.shard.table.dim for p in plan.placements
            ):
                with stopped_clock():  # numba takes a second to import
                    from shardcore.search.anneal import sharder as anneal
                plan = anneal.simplify_plan(plan, problem, model, seed, meter)
                # What fewer parts save is not spent on fewer bytes.
                limit_ms = min(limit_ms, (1 + CONCESSION) * plan.provenance["predicted_ms"])
            return balance_memory(plan, problem, model, limit_ms, meter) if balanced else plan

    return checked_search


class _Sharders(dict[str, Sharder]):
    """Sharders by name, with an error for an unknown name that lists the known ones."""

    def __missing__(self, name: str) -> Sharder:
        require_type(name, str, "algorithm", "a name of a sharder")
        return sharder(name)  # raises: the name is unknown, or needs a policy


_searches: dict[str, Callable[..., Plan]] = {
    "portfolio": search_with_portfolio,
    "anneal": search_with_annealing,
    "anneal_columns": partial(search_with_annealing, space="columns"),
    "random": greedy.random,
    **greedy.ORDERS,
    "neuroshard": neuroshard.search_with_neuroshard,
}
# Listed only where it can run, so that comparisons need no exception for it.
# A folder of the same name has no origin.
if all((spec := find_spec(name)) and spec.origin for name in ("torchrec", "fbgemm_gpu")):
    _searches["torchrec"] = lambda *given, **options: import_module(_TORCHREC).search_with_torchrec_planner(
        *given, **options
    )
SHARDERS: dict[str, Sharder] = _Sharders(
    # Plans of published rules and searches stay theirs: a move may also make them cheaper.
    {name: _checked_search(search, name in SPACE_OF) for name, search in _searches.items()}
)
"""Searches by name. An unknown name raises ShardCoreError."""

LEARNED: dict[str, tuple[str, BeamConfig]] = {
    **{name: (name, TABLE_WISE) for name in NETS},
    **{f"{name}_columns": (name, BeamConfig()) for name in NETS},
}
"""Learned sharders by name: the policy's name, and how tables are cut. NAME_columns cuts them by columns."""


def require_known_sharder(name: str) -> str:
    """Return the name of a sharder in SHARDERS or LEARNED. Raises ShardCoreError for an unknown name."""
    if name in SHARDERS or name in LEARNED:
        return name
    # It exists, but not here: the message says how to install it.
    if name == "torchrec":
        import_module(_TORCHREC).require_torchrec_installed(f"algorithm {name!r} runs TorchRec's planner")
    raise ShardCoreError(
        f"algorithm {name!r} is not known; there are "
        f"{', '.join(SHARDERS)}; and with a policy {', '.join(LEARNED)}"
    )


def sharder(name: str, policy: Policy | None = None) -> Sharder:
    """Sharder by name. Raises ShardCoreError for an unknown name or a missing policy."""
    if require_known_sharder(name) in SHARDERS:
        if policy is not None:
            raise ShardCoreError(
                f"algorithm {name!r} takes no policy; the policy {policy.name!r} that was "
                f"given is for {policy.name} and {policy.name}_columns"
            )
        return SHARDERS[name]
    wanted, config = LEARNED[name]
    if policy is None or policy.name != wanted:
        raise ShardCoreError(
            f"algorithm {name!r} needs a policy {wanted!r}, and "
            f"{'none' if policy is None else repr(policy.name)} was given; "
            f"python -m shardcore train-policy {wanted} makes one, for --policy"
        )
    # With its policy a learned sharder has the signature of all others.
    return _checked_search(partial(place_with_policy, policy, name, config=config))
