"""publish: search plans under the champion and publish them."""

from pathlib import Path

from prefect import flow

from tasks import params, paths, services
from tasks.publish import PublishConfig, publish_plans
from tasks.setting import SettingConfig


@flow(name="publish")
def publish(problems: list[str] | None = None, plans: str = str(paths.PLANS)) -> str:
    """Publish a plan for each problem file (default: all of problems/); a table of the results."""
    setting = params.section("setting", SettingConfig)
    config = params.section("publish", PublishConfig)
    chosen = [Path(p) for p in problems] if problems else sorted(paths.PROBLEMS.glob("*.json"))
    return publish_plans(chosen, Path(plans), setting, config)


if __name__ == "__main__":
    services.run_flow(lambda: print(publish()))
