"""refresh: bring everything up to date: dvc repro, then promote and publish."""

import sys

from prefect import flow

from flows.promote import promote
from flows.publish import publish
from tasks import params, services
from tasks.evaluate import EvaluateConfig
from tasks.measure import MeasureConfig
from tasks.promote import PromoteConfig
from tasks.publish import PublishConfig
from tasks.refresh import repro
from tasks.setting import SettingConfig
from tasks.tables import TablesConfig
from tasks.train import TrainConfig

SECTIONS = {"setting": SettingConfig, "tables": TablesConfig, "measure": MeasureConfig, "train": TrainConfig,
            "evaluate": EvaluateConfig, "promote": PromoteConfig, "publish": PublishConfig}


@flow(name="refresh")
def refresh(target: str = "evaluate") -> str:
    """Rebuild a stage and what it depends on; with the last one, promote and publish too. A table of the published plans."""
    for section, config in SECTIONS.items():
        params.section(section, config)
    repro(target)
    if target != "evaluate":
        return f"stage {target} is up to date"
    promote()
    return publish()


LEGEND = """
against it, against random: the published plan's cost relative to theirs. balance: mean over largest compute of the devices.
extrapolated: the plan goes beyond what was measured (its cost.json says where); the models' own error is in data/evaluation/.
"""
WHERE_NEXT = """
Where to look next (each from this folder, after `. .venv/bin/activate`):
  plans        plans/report.md; plans/<problem>/current names the version in versions/: plan.json, problem.json, cost.json
  accuracy     data/evaluation/: metrics.json, predictions.png, sharders.csv; `dvc metrics show`, `dvc plots show`
  models       data/card.md; mlflow ui --backend-store-uri sqlite:///mlflow.db     then http://127.0.0.1:5000
  flow runs    prefect server start                                  then http://127.0.0.1:4200
  Ray          ray start --head, then RAY_ADDRESS=auto make run      and http://127.0.0.1:8265
"""


def main() -> None:
    table = refresh(*sys.argv[1:2])
    print(f"\nPredicted cost of one training step, embeddings only\n\n{table}\n{LEGEND}{WHERE_NEXT}")


if __name__ == "__main__":
    services.run_flow(main)
