"""Choice of the cost model of plans: the champion of their hardware or, if there is none, a published profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow.entities.model_registry import ModelVersion

from shardcore.core.errors import ShardCoreError
from shardcore.cost.known_errors import NOT_MEASURED
from shardcore.cost.model import CostModel
from shardcore.cost.profile import load_profile, profile_names
from tasks import links, model_history, registry


@dataclass(frozen=True)
class Pricing:
    """The cost model or hardware profile that prices plans, and its origin.

    name: name of the registered model, or of the profile.
    version: version of the champion, or digest of the profile.
    champion: the registered version. None: the model is a profile.
    """

    model: CostModel
    name: str
    version: str
    champion: ModelVersion | None = None

    @property
    def origin_text(self) -> str:
        return f"{self.name} version {self.version}" if self.champion else f"{self.name}, {NOT_MEASURED}"

    @property
    def origin_markdown(self) -> str:
        """Markdown link to the origin of the cost model."""
        return links.model_version_link(self.name, self.version) if self.champion else self.origin_text


def choose_pricing(client: mlflow.MlflowClient, hardware: str, profile: Path | None = None) -> Pricing:
    """Cost model for plans on a hardware: the champion, else a hardware profile.

    profile: file of a profile that is preferred to shipped ones.

    Raises ShardCoreError if there is neither a champion nor a profile.
    """
    if registry.find_version(client, registry.registered_model_name(hardware), registry.CHAMPION) is None:
        if profile and (own := load_profile(profile)).covers_hardware(hardware):
            return Pricing(own.cost_model(), own.name, own.digest)
        # The profile of this name comes before those of the same card with other links.
        for name in sorted(profile_names(), key=lambda name: name != hardware):
            if (shipped := load_profile(name)).covers_hardware(hardware):
                return Pricing(shipped.cost_model(), name, shipped.digest)
        if refused := model_history.refusal_reason(client, registry.registered_model_name(hardware)):
            raise ShardCoreError(f"{refused}; no profile is of {hardware}, so nothing prices its plans")
    model, champion = registry.champion_model(client, hardware)  # raises if there is none
    return Pricing(model, champion.name, str(champion.version), champion)
