"""publish: search plans under the champion and publish them."""

from pathlib import Path

from prefect import flow

from flows import program
from tasks import params, paths
from tasks.publish import PublishConfig, publish_plans
from tasks.setting import SettingConfig


@flow(name="publish")
def publish(problems: list[str] | None = None, plans: str | None = None) -> str:
    """Search plans under the champion and publish them. Returns a table of the results.

    Args:
        problems: Problem files to publish plans for. Default: all in problems/.
        plans: Folder or object-store URL in which to publish. Default: publish.plans of params.yaml.
    """
    setting = params.read_section("setting", SettingConfig)
    config = params.read_section("publish", PublishConfig)
    chosen = [Path(p) for p in problems] if problems else sorted(paths.PROBLEMS.glob("*.json"))
    # The champion counts as published only after a run over all problems, at the usual place.
    everything = not problems and plans in (None, config.plans)
    return publish_plans(chosen, plans or config.plans, setting, config, everything)


if __name__ == "__main__":
    program.run_as_program(publish, shows_result=True)
