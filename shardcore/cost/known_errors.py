"""The name of a model, and its errors in training: on the validation split, or in cross-validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardcore.cost.model import CostModel, price
from shardcore.cost.profile import Profile
from shardcore.step.lower import Workload

NOT_MEASURED = "profile: published measurements, not of your machine"

USUAL_ERRORS = (0.05, 0.13)
"""Mean errors of ops and of exchanges of a model of datasets/cpu-amd-epyc. They stand in where a model knows none."""
_WORSE = 1.5
"""Least ratio to the usual error that is reported."""


def known_model_errors(model: CostModel) -> tuple[float, float]:
    """A model's mean relative errors of ops and of collectives, on the validation split or in cross-validation.

    Those that a profile's rates have, for a model of one.
    """
    if profile := profile_of_model(model):
        return law_uncertainties(profile)
    (ops, _), (exchanges, _) = _judged_errors(model)
    return ops, exchanges


def error_warnings(model: CostModel) -> list[str]:
    """Sentences on a model whose ops or collectives err much more than those of the shipped datasets.

    For a profile, one on what it is.
    """
    # A profile was never measured here, so it has no error to compare.
    if profile_of_model(model):
        return [f"{model.setting.hardware}, {NOT_MEASURED}: measure some groups, and fine-tune from it"]
    return [
        f"{what} err by {error:.0%} {samples}, {error / usual:.1f} times the {usual:.0%} of a model of "
        "datasets/cpu-amd-epyc: measure more, on a quiet machine"
        for what, (error, samples), usual in zip(
            ("Ops", "Exchanges"), _judged_errors(model), USUAL_ERRORS, strict=True
        )
        if error > _WORSE * usual
    ]


def model_label(model: CostModel) -> str:
    """A model's setting and the digest of its training data, as text."""
    if profile := profile_of_model(model):
        on = f", network {profile.network}" if profile.network else ""
        return f"{model.setting}{on}, {NOT_MEASURED}"
    data = (
        getattr(one, "meta", {}).get("provenance", {}).get("data", "unknown") for one in trained_models(model)
    )
    return f"{model.setting}, data {'+'.join(str(digest)[:8] for digest in data)}"


def profile_of_model(model: CostModel) -> Profile | None:
    """The hardware profile behind a cost model. None for other models."""
    return getattr(trained_models(model)[0], "profile", None)


def error_bands(model: CostModel, workload: Workload) -> tuple[float, float] | None:
    """Relative errors that a hardware profile expects: of a predicted step, and of its embeddings' part.

    None if the model is not of a profile.
    """
    if profile_of_model(model) is None:
        return None
    of: Any = trained_models(model)[0]
    return of.step_error_band(workload), of.embeddings_error_band(workload)


def error_bands_text(model: CostModel, workload: Workload) -> str:
    """Expected errors of a predicted step and of its embeddings' part under a hardware profile, to follow its ms.

    As " ±13%, of which the embeddings take 1.681 ms ±17%"; "" under a trained model.
    """
    if (bands := error_bands(model, workload)) is None:
        return ""
    cost = price(workload, model)
    if not cost.dense_ms:
        return f" ±{bands[0]:.0%} (the embeddings alone; job.dense_mflops states the dense part)"
    embeddings_ms = cost.total_ms - cost.dense_ms
    return f" ±{bands[0]:.0%}, of which the embeddings take {embeddings_ms:.3f} ms ±{bands[1]:.0%}"


def trained_models(model: CostModel) -> tuple[CostModel, ...]:
    """The trained models within a cost model, one for each precision."""
    return getattr(model, "models", (model,))


def law_uncertainties(profile: Profile) -> tuple[float, float]:
    """Relative errors of ops and of collectives that a hardware profile's law leaves unexplained."""
    return profile.rates["compute_factor"].uncertainty, profile.rates["exchange_factor"].uncertainty


def _judged_errors(model: CostModel) -> tuple[tuple[float, str], ...]:
    """Relative errors of ops and of collectives, each with text for the samples that it was measured on."""
    # Models of several precisions err together in an op, so the worst one counts.
    return tuple(
        map(
            max,
            zip(
                *(_op_and_exchange_errors(getattr(one, "meta", {})) for one in trained_models(model)),
                strict=True,
            ),
        )
    )


def _op_and_exchange_errors(meta: Mapping[str, Any]) -> tuple[tuple[float, str], tuple[float, str]]:
    metrics = meta.get("metrics", {})
    judged_by = dict.fromkeys(("ops", "exchanges"), "on the validation split") | meta.get("judged_by", {})
    # Mean of both directions, as far as they were measured.
    exchanges = [metrics[name] for name in ("forward_comm_mape", "backward_comm_mape") if name in metrics]
    return (
        (metrics.get("compute_mape", 100 * USUAL_ERRORS[0]) / 100, judged_by["ops"]),
        (sum(exchanges) / len(exchanges) / 100 if exchanges else USUAL_ERRORS[1], judged_by["exchanges"]),
    )
