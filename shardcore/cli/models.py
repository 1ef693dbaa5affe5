"""Options that name a cost model: folders of trained models, or a hardware profile in their place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan

if TYPE_CHECKING:
    from shardcore.cost.model import CostModel


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a command that prices.

    model: folder of a trained model; if weights of tables differ in precision, give the option for each
      precision
    hardware: in place of a model, a profile of published measurements, not of your machine: a name
      (`profile list`), or a file of `profile new` or `profile fit`
    """

    REQUIRED: ClassVar[tuple[tuple[str, ...], ...]] = (("model", "hardware"),)
    model: list[Path] | None = None
    hardware: Annotated[str, "PROFILE"] | None = None

    @property
    def source(self) -> str | list[Path]:
        """Profile name or model folders that the options give. [] if they give neither."""
        return (self.model or []) if self.hardware is None else self.hardware


def model_source(args: ModelOptions, path: Path, plan: Plan) -> str | list[Path]:
    """Model folders or profile that the options give, else the shipped profile with which the plan was made.

    path: file of the plan. Raises ShardCoreError if neither is known.
    """
    from shardcore.cost.profile import load_profile, profile_names

    if args.source:
        return args.source
    made_with = plan.provenance.get("model_digest")
    name = next((n for n in profile_names() if load_profile(n).digest == made_with), None)
    if name is None:
        raise ShardCoreError(
            f"{path} was not planned with a profile that ships with ShardCore; give --model or --hardware"
        )
    print(f"note: priced by profile {name}, with which {path} was planned", file=sys.stderr)
    return name


def load_cost_model(source: str | Sequence[Path]) -> CostModel:
    """Load the cost model of a hardware profile, or of model folders."""
    from shardcore.cost import composite
    from shardcore.cost.profile import load_profile

    return load_profile(source).model() if isinstance(source, str) else composite.load_models(source)


def source_digest(source: str | Sequence[Path]) -> str:
    """Digest of a hardware profile, or digests of model folders joined by "+"."""
    from shardcore.cost.profile import load_profile
    from shardcore.io import model_files

    if isinstance(source, str):
        return load_profile(source).digest
    return "+".join(map(model_files.model_digest, source))
