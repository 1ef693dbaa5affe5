"""Options that name a cost model: folders of trained models, or a hardware profile in their place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shardcore.cli.options import ModelOptions
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem
from shardcore.cost import composite
from shardcore.cost.model import CostModel
from shardcore.cost.profile import load_profile, network_names, profile_names
from shardcore.io import model_files


def model_source(args: ModelOptions, path: Path, plan: Plan) -> str | list[Path]:
    """Model folders or profile that the options give, else the shipped profile with which the plan was made.

    path: file of the plan. Raises ShardCoreError if neither is known.
    """
    if args.source:
        return args.source
    made_with = plan.provenance.get("model_digest")
    names = (f"{card}{on}" for on in ("", *(f"@{n}" for n in network_names())) for card in profile_names())
    name = next((name for name in names if load_profile(name).digest == made_with), None)
    if name is None:
        raise ShardCoreError(
            f"{path} was not planned with a profile that ships with ShardCore; give --model or --hardware"
        )
    print(f"note: priced by profile {name}, with which {path} was planned", file=sys.stderr)
    return name


def load_cost_model(source: str | Sequence[Path]) -> CostModel:
    """Load the cost model of a hardware profile, or of model folders."""
    return load_profile(source).cost_model() if isinstance(source, str) else composite.load_models(source)


def load_model_for_problem(source: str | Sequence[Path], problem: Problem) -> CostModel:
    """Load the cost model of a source for a problem. Raises ShardCoreError if it is for another setting."""
    model = load_cost_model(source).for_problem(problem)
    problem.require_setting(model.setting)
    return model


def source_digest(source: str | Sequence[Path]) -> str:
    """Digest of a hardware profile, or digests of model folders joined by "+"."""
    if isinstance(source, str):
        return load_profile(source).digest
    return "+".join(map(model_files.model_digest, source))
