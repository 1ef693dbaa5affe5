"""promote: register the trained model, and make it champion if it is at least as good."""

from prefect import flow
from prefect.runtime import flow_run

from flows import program
from shardcore import report
from tasks import links, params, paths
from tasks.artifacts import create_markdown_artifact
from tasks.promote import PromoteConfig, Promotion, promote_model, promote_policy


@flow(name="promote")
def promote(approve: bool = False) -> str | None:
    """Register the trained model, and make it champion if it is at least as good as the champion.

    A refresh, of which this is a part, publishes the plans afterwards. Otherwise the registry watch does.
    Returns the champion's version afterwards.

    Args:
        approve: Approve a model that passes, if promote.approval in params.yaml asks for a person.
    """
    config, will_publish = params.read_section("promote", PromoteConfig), bool(flow_run.parent_flow_run_id)
    promotion = promote_model(paths.MODEL, paths.MEASUREMENTS, config, approve, will_publish)
    promote_policy(paths.POLICY)
    create_markdown_artifact(promotion_page(promotion), key="promotion", description=promotion.reason)
    return promotion.champion


def promotion_page(promotion: Promotion) -> str:
    """Markdown page on a promotion: the champion, the challenger and the decision."""
    rows = [
        (role, links.model_version_link(promotion.model, version) if version else "none yet")
        for role, version in (("champion", promotion.champion), ("challenger", promotion.challenger))
    ]
    return f"{promotion.reason}\n\n{report.markdown_table(('alias', 'version'), rows)}"


if __name__ == "__main__":
    program.run_as_program(promote)
