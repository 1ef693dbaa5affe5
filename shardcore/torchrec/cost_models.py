"""The cost model of a job: the one that is given, or a profile of its hardware."""

from __future__ import annotations

from pathlib import Path

from shardcore.core.validation import require
from shardcore.cost.model import CostModel, require_model
from shardcore.cost.profile import load_profile, profile_names, profile_of_device


def resolve_cost_model(model: CostModel | str | Path | None, compute_device: str = "cuda") -> CostModel:
    """Cost model that a planner's `model` argument means: the model itself, a profile by name or file, or the GPU's.

    model: a cost model; or a profile of published measurements, by name or file. None: the profile of the job's
      GPU (not exercised on a real one).

    Raises ShardCoreError for an unknown profile, a GPU without one, and where there is no GPU.
    """
    if model is None:
        return profile_of_device(_cuda_device_name(compute_device)).cost_model()
    # Names and files of profiles are texts, models are objects.
    if isinstance(model, str | Path):
        return load_profile(model).cost_model()
    require_model(model)
    return model


def _cuda_device_name(compute_device: str) -> str:
    import torch

    # Without a GPU there is no profile to choose, so the caller has to give a model.
    require(
        compute_device == "cuda" and torch.cuda.is_available(),
        "model is None, and there is no CUDA device here to take a profile of; give model=load_model(folder), or "
        f"the name of a profile: {', '.join(profile_names())}",
    )
    return torch.cuda.get_device_name()
