"""Plans published by hand, for the tests of the store."""

from shardcore.core.types import Placement, Plan, Shard
from shardcore.io import files, writing
from shardcore.plans import store
from shardcore.plans.decisions import Decision


def plan(problem, device, **provenance):
    return Plan(tuple(Placement("column", Shard.whole(t), (device,)) for t in problem.tables), provenance)


def publish(root, problem, device, outcome="better", **fields):
    """A plan with everything on a device becomes current; the decision."""
    with store.publishing_lock(root, problem.name):
        version = store.add_version(
            root, problem, plan(problem, device), {"total_ms": float(device)}, f"<html>{device}</html>"
        )
        before = store.last_decision(root, problem.name)
        fields = {
            "reason": "of a test",
            "current": version,
            "candidate": version,
            "candidate_ms": float(device),
            "problem_digest": files.problem_digest(problem),
            "parent": before and before.id,
            **fields,
        }
        decision = Decision(problem.name, outcome, **fields)
        store.record_decision(root, decision)
    return decision


def sealed_decision(root, name, decision, **changes):
    """Make a changed decision the last one, under the name of its own digest, as an attacker can."""
    document = {**decision.to_json(), **changes}
    found = files.json_digest(document)
    writing.write_json(root / name / "decisions" / f"{found}.json", document)
    (root / name / "current").write_text(f"{found}\n")
