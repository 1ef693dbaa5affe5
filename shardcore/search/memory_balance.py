"""Balance memory: fewer bytes on the fullest device of a plan, where that costs next to nothing.

The last step of searches that anneal. Where memory is ample, no search looks at it before.

Shapes: N placements, D devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.progress import OutOfTime
from shardcore.core.types import Placement, Plan, Problem
from shardcore.cost.model import CostModel, group_op_ms, is_less, predicted_total_ms, price
from shardcore.search.budget import Meter
from shardcore.search.state.shards import CONCESSION, priced_plan
from shardcore.step.access import output_bytes
from shardcore.step.kinds import (
    possible_groups,
    sharding_kind_by_name,
    sharding_kind_for_table,
    shards_by_device,
)
from shardcore.step.lower import Workload, lower
from shardcore.step.memory import peak_bytes_function
from shardcore.step.ways import consolidate_placements, fixed_placements

_TRIES = 8
"""Plans priced, at most."""
_LEAST = 0.02
"""The least that a move takes from the fullest device, relative to the mean bytes of devices."""


def balance_memory(plan: Plan, problem: Problem, model: CostModel, limit_ms: float, meter: Meter) -> Plan:
    """Plan with fewer bytes on its fullest device that costs at most `limit_ms`. The same plan if none is found.

    Placements of the fullest device move to other devices, or change places with smaller ones there.

    meter: has the seconds that this may take.
    """
    best = plan
    with suppress(OutOfTime), meter.enforced_deadline():
        workload = lower(plan, problem)
        moves = _moves_off_fullest_device(plan, workload, problem, model)
        for _ in range(_TRIES):
            if (placements := next(moves, None)) is None:
                break
            # Constraints and limits of ops may refuse it.
            with suppress(ShardCoreError):
                moved = Plan(consolidate_placements(placements))
                after = lower(moved, problem)
                # Sorted, as several devices may be the fullest.
                n_bytes, before = (sorted(w.memory_bytes, reverse=True) for w in (after, workload))
                if n_bytes < before and not is_less(limit_ms, predicted_total_ms(after, model)):
                    best, workload, moves = (
                        moved,
                        after,
                        _moves_off_fullest_device(moved, after, problem, model),
                    )
        if best is not plan:
            return priced_plan(best.placements, problem, model, fits=True, **plan.provenance)
    return plan


def _moves_off_fullest_device(
    plan: Plan, workload: Workload, problem: Problem, model: CostModel
) -> Iterator[list[Placement]]:
    """Placements after each move off the fullest device that slows no device beyond the slowest.

    Nor may one send more outputs than any does now. The move that leaves fewest bytes comes first.
    """
    fixed = fixed_placements(problem)
    movable = [p for p in plan.placements if p not in fixed]
    # The first shard of each placement, which is the largest: the last of its row ranges may have fewer rows.
    shards = [next(shard for _, shard in shards_by_device(p)) for p in movable]
    peak_bytes, ones = peak_bytes_function(problem), np.ones(len(problem.topology))
    # [N, 3] bytes of each shard, ms as an op of its own, and bytes of outputs.
    each = np.stack(
        [
            [
                peak_bytes(sharding_kind_for_table(p.kind, s.table), s)
                for p, s in zip(movable, shards, strict=True)
            ],
            group_op_ms([[shard] for shard in shards], model),
            [output_bytes(shard, problem.global_batch) for shard in shards],
        ],
        -1,
    )
    # [D, 3] the same of devices.
    load = np.stack([workload.memory_bytes, price(workload, model).compute_ms, 0 * ones], -1)
    for p, (_, _, outputs) in zip(movable, each, strict=True):
        load[list(p.devices), 2] += outputs
    most = load.max(0) * [1, 1 + CONCESSION, 1 + CONCESSION] - [_LEAST * load[:, 0].mean(), 0, 0]
    slowness = np.stack([ones, [1 / d.speed for d in problem.topology.devices], ones], -1)
    groups = [
        possible_groups(
            sharding_kind_by_name(p.kind),
            p.shard.table.rows,
            problem.topology,
            problem.pinned_devices.get(p.shard.table.name),
        )
        for p in movable
    ]
    found = list[tuple[float, int, dict[Placement, tuple[int, ...]]]]()
    for i in (i for i, p in enumerate(movable) if load[:, 0].argmax() in p.devices):
        here, taken = movable[i].devices, set(movable[i].devices)
        # To each group alone, then in exchange for each placement of its kind.
        targets = [
            *((group, {}, np.zeros(3)) for group in groups[i]),
            *(
                (q.devices, {q: here}, each[j])
                for j, q in enumerate(movable)
                if q.kind == movable[i].kind and q.devices in groups[i] and here in groups[j]
            ),
        ]
        for there, back, less in (x for x in targets if taken.isdisjoint(x[0])):
            # [D, 3] what devices get more, or less, if all of them took part.
            more = (each[i] - less) * slowness
            after = np.maximum((load - more)[list(here)].max(0), (load + more)[list(there)].max(0))
            if (after <= most).all():
                found.append((after[0], len(found), {movable[i]: there, **back}))
    for _, _, devices in sorted(found, key=lambda move: move[:2]):
        yield [replace(p, devices=devices.get(p, p.devices)) for p in plan.placements]
