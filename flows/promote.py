"""promote: register the trained model; champion if at least as good."""

from prefect import flow

from tasks import params, paths, services
from tasks.promote import PromoteConfig, promote_model


@flow(name="promote")
def promote() -> str:
    """The version that is champion afterwards."""
    config = params.section("promote", PromoteConfig)
    return promote_model(paths.MODEL, paths.MEASUREMENTS, config)


if __name__ == "__main__":
    services.run_flow(promote)
