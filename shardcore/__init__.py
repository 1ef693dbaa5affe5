"""ShardCore: place the embedding tables of recommendation models on accelerators, by pre-train and search.

The nouns are here; the verbs and the protocols live in their modules and load at first use:

  lower(plan, problem)       work of one training step of a plan             shardcore.step.lower
  price(workload, model)     its predicted cost                              shardcore.cost.model
  replay(workload, setting)  its cost, measured on real processes            shardcore.measure.replay
  load_model(folders)        a trained cost model, or one of each precision  shardcore.cost.composite
  load_profile(name)         a card's published rates; .cost_model() prices with them  shardcore.cost.profile
  plot(plan, problem, model) bars of each device, for notebooks and files    shardcore.report.device_figures
  load_plan(root, name)      a published plan and its problem                shardcore.plans.store
  SHARDERS                   by name: function(problem, model, seed=, budget=) -> Plan    shardcore.search
  Budget(evals=, seconds=)   limit of a search                               shardcore.search
  decide(problem, model, decisions, sharder)  plan under the best decisions  shardcore.search.decisions
  CostModel, Sharder, Decision   what a model, a search or a decision has to offer

Conformance suites for one's own are in shardcore.testing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.core.extras import explain_missing_extras
from shardcore.core.step_cost import StepCost
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table

if TYPE_CHECKING:
    from shardcore.cost.composite import load_models as load_model
    from shardcore.cost.model import CostModel, price
    from shardcore.cost.profile import load_profile
    from shardcore.measure.replay import replay
    from shardcore.plans.store import load_plan
    from shardcore.report.device_figures import plot
    from shardcore.search import SHARDERS, Budget, Sharder
    from shardcore.search.decisions.driver import Decision, decide
    from shardcore.step.lower import lower

__version__ = "0.1.0"

_LATE = {
    "Budget": ("shardcore.search", "Budget"),
    "CostModel": ("shardcore.cost.model", "CostModel"),
    "Decision": ("shardcore.search.decisions.driver", "Decision"),
    "SHARDERS": ("shardcore.search", "SHARDERS"),
    "Sharder": ("shardcore.search", "Sharder"),
    "decide": ("shardcore.search.decisions.driver", "decide"),
    "load_model": ("shardcore.cost.composite", "load_models"),
    "load_plan": ("shardcore.plans.store", "load_plan"),
    "load_profile": ("shardcore.cost.profile", "load_profile"),
    "lower": ("shardcore.step.lower", "lower"),
    "plot": ("shardcore.report.device_figures", "plot"),
    "price": ("shardcore.cost.model", "price"),
    "replay": ("shardcore.measure.replay", "replay"),
}
"""Module and attribute of each name that loads at first use. Type checkers see the imports above."""

__all__ = [
    "SHARDERS",
    "Budget",
    "Constraints",
    "CostModel",
    "Decision",
    "Device",
    "Infeasible",
    "Placement",
    "Plan",
    "Problem",
    "Reuse",
    "Setting",
    "SettingMismatch",
    "Shard",
    "ShardCoreError",
    "Sharder",
    "StepCost",
    "Table",
    "Topology",
    "Zipf",
    "decide",
    "load_model",
    "load_plan",
    "load_profile",
    "lower",
    "plot",
    "price",
    "replay",
]


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module 'shardcore' has no attribute {name!r}")
    module, attribute = _LATE[name]
    with explain_missing_extras():
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
