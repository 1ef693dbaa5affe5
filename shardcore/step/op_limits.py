"""Limits of one FBGEMM op on CUDA: features and samples in 32 bits together, and ids that 32 bits count."""

from __future__ import annotations

from collections import Counter, defaultdict

from shardcore.core.errors import Infeasible
from shardcore.core.types import Plan, Problem, Shard
from shardcore.step.access import access_share
from shardcore.step.kinds import Layout, run_of, shards_on

MOST_IDS = (1 << 31) - 1
"""Ids of one op in a step. Source: pytorch/FBGEMM 6236, pytorch/torchrec 4443."""


class TooManyInOneOp(Infeasible):
    """An op has more features or ids than FBGEMM runs. Another plan may spread them."""


def most_features(batch: int) -> int:
    """The most features of an op with pooled outputs over so many samples.

    Its backward packs the numbers of a feature and of a sample into 32 bits. T features take as many bits as
    T itself. Source: get_infos_metadata in FBGEMM.
    """
    # The most numbers in the bits that are left is one less than a power of two.
    return (1 << max(0, 32 - batch.bit_length())) - 1


def op_ids(run: Layout, shard: Shard, problem: Problem) -> float:
    """Ids that the op of a run looks up in a shard in a step."""
    return run.batch(problem) * shard.table.looked_up * access_share(shard)


def may_bind(problem: Problem) -> bool:
    """Tell if some plan may have more in an op than FBGEMM runs."""
    tables = problem.tables
    # All tables in one op is the worst case. Mostly it is far below the limits, which saves every check.
    return not problem.topology.on_cpu and (
        sum(t.features for t in tables) > most_features(problem.global_batch)
        or sum(t.looked_up for t in tables) * problem.global_batch > MOST_IDS
    )


def require_ops(plan: Plan, problem: Problem) -> None:
    """Raise TooManyInOneOp, naming the first device whose op has too many features or ids."""
    if not may_bind(problem):
        return
    # One entry a table and row range: two shards of columns would count its features and ids twice.
    held = {
        (run_of(p.kind, s.table), device, s.table, s.row_lo): s
        for p in plan.placements
        for device, s in shards_on(p)
    }
    features: Counter[tuple[Layout, int]] = Counter()
    ids: defaultdict[tuple[Layout, int], float] = defaultdict(float)
    for (run, device, table, _), shard in held.items():
        # Sequences have no pooled outputs, so their op packs no feature number.
        features[run, device] += 0 if run.sequence else table.features
        ids[run, device] += op_ids(run, shard, problem)
    for (run, device), n in features.items():
        batch, what = run.batch(problem), f"device {device} of problem {problem.name!r} would run"
        if n > (most := most_features(batch)):
            raise TooManyInOneOp(
                f"{what} {n} features in one op ({run.name}) over {batch} samples; FBGEMM's CUDA op packs both into "
                f"32 bits, so at most {most} features: it needs more devices, or a smaller batch"
            )
        if ids[run, device] > MOST_IDS:
            raise TooManyInOneOp(
                f"{what} {ids[run, device]:.3g} ids in one op ({run.name}); FBGEMM's CUDA op counts them in 32 bits, "
                f"so at most {MOST_IDS}: it needs more devices, or a smaller batch"
            )
