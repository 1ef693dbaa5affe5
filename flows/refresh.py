"""refresh: bring everything up to date by dvc repro, then promote and publish."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from flows.promote import promote
from flows.publish import publish
from flows.tables import TablesConfig
from flows.train import TrainConfig
from flows.train_policy import TrainPolicyConfig
from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.io import schema
from shardcore.stages.evaluate import EvaluateConfig
from shardcore.stages.measure_config import MeasureConfig
from shardcore.stages.screen import open_page
from tasks import console, links, owned, params, paths, services
from tasks.artifacts import create_markdown_artifact
from tasks.commit import git
from tasks.promote import PromoteConfig
from tasks.publish import PublishConfig, compile_searches, publish_first_plan
from tasks.refresh import (
    OPTIONAL,
    STAGES,
    Stage,
    StageRun,
    merge_mappings,
    override_params,
    push_data,
    reproduce_stage,
    require_pushable,
    stage_heading,
)
from tasks.setting import SettingConfig

SECTIONS = {
    "setting": SettingConfig,
    "tables": TablesConfig,
    "measure": MeasureConfig,
    "train": TrainConfig,
    "train_policy": TrainPolicyConfig,
    "evaluate": EvaluateConfig,
    "promote": PromoteConfig,
    "publish": PublishConfig,
}


@flow(name="refresh")
def refresh(
    target: Stage = "evaluate", overrides: dict[str, dict[str, Any]] | None = None, push: bool = False
) -> str:
    """Rebuild a stage and its dependencies. After the last stage, promote and publish too.

    Returns a table of the published plans.

    Args:
        target: The stage to rebuild (dvc repro).
        overrides: Parameters to write into params.yaml first, by section, such as
            {"measure": {"compute_samples": 1000}}.
        push: Push the data to DVC's remote. Commit dvc.lock and params.yaml on the current branch.
    """
    # Checked before hours of work, not after.
    if push:
        require_pushable()
    override_params(overrides or {}, SECTIONS)
    stages: list[StageRun] = []
    if target == STAGES[-1]:
        config = params.read_section("publish", PublishConfig)
        # Both threads are of one run, whose end ends what they start.
        with owned.owned_run():
            # On another core: nothing is measured yet.
            tables = reproduce_stage.submit(STAGES[0], target)
            try:
                publish_first_plan(sorted(paths.PROBLEMS.glob("*.json")), config.plans, config)
            # To measure needs no plan. `publish` tells at the end what is wrong.
            except ShardCoreError as error:
                get_run_logger().warning("there is no first plan: %s", error)
            stages = tables.result()
    stages = reproduce_stage(target, done=stages)
    targets: list[Stage] = [target]
    if target == STAGES[-1] and params.read_section(OPTIONAL, TrainPolicyConfig).algorithm:
        stages += reproduce_stage(OPTIONAL)[-1:]
        targets.append(OPTIONAL)
    # The first commit has the state of all stages, so others are None.
    commit, *_ = [push_data(t) for t in targets] if push else [None]
    done = f"stage {target} is up to date"
    if target == STAGES[-1]:
        # Promote and publish change the registry and the plans, so DVC does not run them.
        get_run_logger().info(stage_heading("promote", target), extra=console.STAGE)
        champion = promote()
        done = "no model is champion yet: the line of stage promote says what the challenger waits for"
        # Without a champion, a profile prices plans, and they come with the reason why the challenger was refused.
        if champion or not params.read_section("promote", PromoteConfig).approval:
            get_run_logger().info(stage_heading("publish", target), extra=console.STAGE)
            done = publish()
    create_markdown_artifact(
        refresh_page(stages, overrides or {}, commit, done), key="refresh", description=f"refresh of {target}"
    )
    return done


def refresh_page(
    stages: Sequence[StageRun], overrides: dict[str, dict[str, Any]], commit: str | None, done: str
) -> str:
    """Markdown page on a refresh: stages that ran, parameters that were set, the commit, and the result."""
    parts = [
        report.markdown_table(
            ("stage", "ran", "seconds"),
            [(s.stage, "yes" if s.ran else "nothing changed", f"{s.seconds:.0f}") for s in stages],
        )
    ]
    if rows := [
        (f"{section}.{key}", value) for section, values in overrides.items() for key, value in values.items()
    ]:
        parts.append(report.markdown_table(("parameter", "set to"), rows))
    if commit:
        parts.append(f"dvc.lock and params.yaml are committed as `{commit}`; their data is at DVC's remote.")
    parts += [dashboard] if (dashboard := links.ray_dashboard_link()) else []
    return "\n\n".join([*parts, f"```\n{done}\n```"])


LEGEND = """
against it, against random: the published plan's cost relative to theirs. balance: mean over largest compute
of the devices. extrapolated: the plan goes beyond what was measured (its cost.json says where). kept: nothing
is cheaper than the plan before, or by less than the error of the difference, which follows in percent.
"""
WHERE_NEXT = """
Where to look next (each from this folder, after `. .venv/bin/activate`):
  plans        plans/report.md; `python -m shardcore history plans NAME`;
               plans/NAME/versions/VERSION/report.html
  accuracy     data/evaluation/: metrics.json, predictions.png, sharders.csv;
               `dvc metrics show`, `dvc plots show`
  models       data/card.md; mlflow ui --backend-store-uri sqlite:///mlflow.db     then http://127.0.0.1:5000
  flow runs    prefect server start                                  then http://127.0.0.1:4200
  Ray          ray start --head, then RAY_ADDRESS=auto make run      and http://127.0.0.1:8265
"""
CHANGED_LOCK = f"""
{paths.LOCK}, which git tracks, now names this machine's data. Commit it (and `dvc push` the data) to share them,
or take the shipped one back by `git checkout {paths.LOCK}`.
"""


def parse_override(text: str) -> dict[str, Any]:
    """Parse an override, such as "measure.kernels.tolerance=0.1", into nested mappings with its YAML value."""
    import yaml

    name, equals, value = text.partition("=")
    names = name.split(".")
    if not (equals and len(names) > 1 and all(names)):
        raise ShardCoreError(f"--set {text!r} needs the form SECTION.KEY=VALUE")
    try:
        return reduce(lambda found, key: {key: found}, reversed(names), yaml.safe_load(value))
    except yaml.YAMLError:
        raise ShardCoreError(
            f"--set {text!r} has a value that is not YAML; it needs one such as 1000, true or [a, b]"
        ) from None


def read_overrides(path: Path) -> dict[str, dict[str, Any]]:
    """Read parameter overrides, by section, from a YAML file. Raises ShardCoreError for a file without sections."""
    found = schema.read_yaml(path)
    if not isinstance(found, dict) or not all(isinstance(values, dict) for values in found.values()):
        raise ShardCoreError(f"{path} holds no sections with keys, such as those of {paths.PARAMS}")
    return {str(name): dict(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flows.refresh",
        description="Rebuild a stage and what it depends on; with the last one, promote and publish too.",
    )
    parser.add_argument("target", nargs="?", choices=(*STAGES, OPTIONAL), default=STAGES[-1])
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="write a parameter into params.yaml first",
    )
    parser.add_argument(
        "--push",
        action="store_true",
        help="push the data to DVC's remote, and commit dvc.lock and params.yaml",
    )
    parser.add_argument(
        "--params",
        type=Path,
        metavar="FILE",
        help="write the sections of this file into params.yaml first, such as demo.yaml; --set wins over it",
    )
    parser.add_argument("--open", action="store_true", help="show the page of the published plans at the end")
    args = parser.parse_args()

    def run_refresh() -> None:
        overrides: dict[str, dict[str, Any]] = read_overrides(args.params) if args.params else {}
        for override in map(parse_override, args.set):
            merge_mappings(overrides, override)
        done = refresh(args.target, overrides, args.push)
        changed = ""
        # Outside of a checkout nothing is tracked, and the run has its result all the same.
        with suppress(ShardCoreError):
            changed = CHANGED_LOCK if git("diff", "--name-only", "HEAD", "--", str(paths.LOCK)) else ""
        table = (
            f"Predicted cost of one training step, embeddings only\n\n{done}\n{LEGEND}{WHERE_NEXT}{changed}"
        )
        console.show("text", f"\n{table if args.target == STAGES[-1] else done}")
        if args.open:
            index = Path(params.read_section("publish", PublishConfig).plans, "index.html")
            if index.exists():
                console.show("text", f"  page         {index.resolve().as_uri()}\n")
                open_page(index)

    services.run_flow(run_refresh, meanwhile=compile_searches if args.target == STAGES[-1] else lambda: None)


if __name__ == "__main__":
    main()
