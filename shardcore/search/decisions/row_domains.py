"""Row domains: hosts or pods, over which TorchRec divides rows of tables (table_row_wise, grid_shard).

A job divides rows over one of both: over pods if it has TORCHREC_RESOLVED_POD_SIZE. Over a pod, more devices
share a table's lookups and memory, and its outputs cross fewer and slower links. So neither is always better.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shardcore.core.links import ROWS_OVER
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import CostModel
from shardcore.search.decisions.driver import Decision, FoundPlan, Proposal, ProposalOutcome
from shardcore.step.kinds import row_domain_choices, row_domain_of, sharding_kind_by_name


@dataclass(frozen=True)
class RowDomains(Decision, noun="row domains"):
    """Choose the domains that rows are divided over, where the topology leaves it open.

    start: a plan that the search improves. Its job keeps its domains.
    """

    start: Plan | None = None

    name: ClassVar[str] = "row domains"
    level: ClassVar[int] = 2
    against: ClassVar[Mapping[str, str]] = {
        "towers": "a model has towers of hosts, or of pods where topology.rows_over says so"
    }

    def proposals(
        self, problem: Problem, model: CostModel, seconds: float | None
    ) -> Generator[Proposal, ProposalOutcome, None]:
        """Problem with rows divided over hosts, and over pods where all pods are of one size."""
        topology = problem.topology
        domains = (
            (row_domain_of(topology, self.start.placements),) if self.start else row_domain_choices(topology)
        )
        for i, domain in enumerate(domains):
            # Devices of a domain, as TorchRec's groups of ranks have them.
            size = len(topology.devices_by_domain(ROWS_OVER[domain])[0])
            yield Proposal(
                words=f"rows over {domain}s of {size} device{'s' * (size > 1)}",
                problem=replace(problem, topology=replace(topology, rows_over=domain)),
                more=len(domains) - 1 - i,
            )

    def adopt(self, proposal: Proposal, found: FoundPlan, problem: Problem, model: CostModel) -> FoundPlan:
        """The plan as one of the original problem, whose topology names no domain (host, pod) over which rows are
        divided: kinds of sharding say it.
        """
        return replace(found, problem=replace(found.problem, topology=problem.topology))

    def ledger_facts(self, outcome: ProposalOutcome) -> Mapping[str, Any]:
        if outcome.found is None:
            return {}
        divided = {
            p.shard.table.name
            for p in outcome.found.plan.placements
            if sharding_kind_by_name(p.kind).rows_over
        }
        return {"tables divided so": len(divided)}
