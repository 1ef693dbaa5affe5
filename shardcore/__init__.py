"""ShardCore: place the embedding tables of recommendation models on accelerators, by pre-train and search.

The nouns are here; the verbs live in their modules and load when asked for:

  lower(plan, problem)       what one training step of a plan does          shardcore.step.lower
  price(workload, model)     what a model predicts that it costs            shardcore.cost.model
  load_model(folders)        a trained cost model, or one of each precision shardcore.cost.composite
  SHARDERS                   name -> function(problem, model, seed=, budget=) -> Plan    shardcore.search
  Budget(evals=, seconds=)   how long a search may run                       shardcore.search
  replay(workload, setting)  what it costs, measured on real processes      shardcore.measure.replay
  load_plan(root, name)      a published plan and its problem               shardcore.plans.store
"""

from importlib import import_module

from shardcore.core.access_statistics import Reuse, Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.core.extras import extras_named
from shardcore.core.step_cost import StepCost
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table

__version__ = "0.1.0"

_VERBS = {
    "lower": ("shardcore.step.lower", "lower"),
    "price": ("shardcore.cost.model", "price"),
    "load_model": ("shardcore.cost.composite", "load"),
    "Budget": ("shardcore.search", "Budget"),
    "SHARDERS": ("shardcore.search", "SHARDERS"),
    "replay": ("shardcore.measure.replay", "replay"),
    "load_plan": ("shardcore.plans.store", "load_plan"),
}

__all__ = [
    "Constraints",
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
    "StepCost",
    "Table",
    "Topology",
    "Zipf",
    *_VERBS,
]


def __getattr__(name: str) -> object:
    if name not in _VERBS:
        raise AttributeError(f"module 'shardcore' has no attribute {name!r}")
    module, attribute = _VERBS[name]
    with extras_named():
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
