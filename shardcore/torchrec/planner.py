"""Planning from a TorchRec model: its tables as a Problem, and a drop-in planner.

planner = ShardCorePlanner(topology, batch_size=512, constraints=constraints, model=load_model("model/"))
plan = planner.collective_plan(module, sharders, dist.group.WORLD)
module = DistributedModelParallel(module, plan=plan, sharders=sharders)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import require, require_type
from shardcore.cost.known_errors import profile_of_model
from shardcore.cost.model import CostModel
from shardcore.plans.survive import read_prepared_plan
from shardcore.search import DEFAULT_SHARDER, Budget, require_known_sharder, sharder
from shardcore.search.state.packing import least_excess_plan
from shardcore.search.state.refusal import refusal_message
from shardcore.step.lower import lower
from shardcore.torchrec import constraints as constrained
from shardcore.torchrec import fields, optimizers, topologies
from shardcore.torchrec.cost_models import resolve_cost_model
from shardcore.torchrec.lookups import read_lookups
from shardcore.torchrec.modules import (
    applicable_sharders,
    quote_first_names,
    require_all_modules_planned,
    require_sharders,
    tables_of_model,
    unpriced_wrappers,
    weight_gradient_notes,
)
from shardcore.torchrec.plan_files import require_same_tables
from shardcore.torchrec.problems import default_reserved_share, problem_for
from shardcore.torchrec.settings import payloads_of_sharders, unpriced_hardware, unpriced_plan_lines
from shardcore.torchrec.sharding_plan import to_torchrec
from shardcore.torchrec.topologies import topology_from_torchrec

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.distributed.types import ModuleSharder, ShardingPlan

    from shardcore.torchrec.lookups import Lookups

    Kinds = Mapping[str, tuple[str, ...]]

BATCH_SIZE = 512
"""Samples per rank, if none are given. The default of TorchRec's planner."""


def plan_for(
    module: nn.Module,
    topology: Topology | TheirTopology,
    model: CostModel | str | Path,
    lookups: Lookups,
    algorithm: str = DEFAULT_SHARDER,
    seed: int = 0,
    budget: Budget | None = None,
    constraints: Constraints | None = None,
    global_batch: int | None = None,
    job: Job | None = None,
) -> tuple[Plan, Problem]:
    """Plan for a module's embedding tables, and the problem that the plan solves.

    model: the cost model, or the name or file of a profile.
    global_batch: samples of a step over all devices. None: the cost model's.
    job: properties of a step around the embeddings. None: the default.

    The optimizer is the one that the model's weights have, or else that of the cost model. Raises as
    `problem_for` and all sharders do, and for an unknown algorithm.
    """
    # The search is looked up first, so that an unknown name fails before anything is read.
    model, search = resolve_cost_model(model), sharder(algorithm)
    batch = model.setting.batch if global_batch is None else global_batch
    optimizer = optimizers.optimizer_of_tables(tables_of_model(module)) or model.setting.optimizer
    problem = problem_for(module, topology, batch, lookups, optimizer, constraints, job=job)
    # The optimizer's state counts in memory even where the model prices another one.
    priced = optimizers.relabel_optimizer(model, problem.optimizer).for_problem(problem)
    return search(problem, priced, seed=seed, budget=budget), problem


class ShardCorePlanner:
    """A drop-in for TorchRec's EmbeddingShardingPlanner. It is a torchrec ShardingPlanner.

    topology: TorchRec's or ours. Bandwidths of TorchRec's are used where they are not its defaults.
    batch_size: samples per rank.
    constraints: TorchRec's, by table. How each field is treated: `fields.FIELDS`.
    model: the cost model, or the name or file of a profile of published measurements. None: the profile of the
      job's GPU.
    algorithm, seed, budget: of the search.
    lookups: as in `problem_for`, instead of pooling_factors.
    reserved: share of HBM kept free of embeddings. None: 15%, or nothing if the job has the memory of its dense
      part (`dense_memory.measured_job`).
    job: how a step runs around the embeddings: pipeline, dense part, payloads. None: the default, with the
      payloads of the sharders' codecs.
    prepared: folder of plans for the loss of a rank or a host (`plan --survive`). One that is valid for the job is
      taken in place of a search.

    The optimizer that counts is the one that the module's weights or the sharders have, or else that of the
    cost model.

    After a plan, `problem` and `our_plan` are the problem and our plan. `unpriced` has a line for each setting
    that the price leaves out, for defaults that nobody may have meant, and for what lies beyond the measured
    range.
    """

    def __init__(
        self,
        topology: TheirTopology | Topology,
        batch_size: int | None = BATCH_SIZE,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        model: CostModel | str | Path | None = None,
        algorithm: str = DEFAULT_SHARDER,
        seed: int = 0,
        budget: Budget | None = None,
        lookups: Lookups | None = None,
        reserved: float | None = None,
        job: Job | None = None,
        prepared: str | Path | None = None,
    ) -> None:
        from torchrec.distributed.types import ShardingPlanner

        algorithm = require_known_sharder(algorithm)
        # Registering avoids importing TorchRec with this module.
        ShardingPlanner.register(type(self))
        self.compute_device = getattr(topology, "compute_device", "cuda")
        model = resolve_cost_model(model, self.compute_device)
        self.batch_size = BATCH_SIZE if batch_size is None else batch_size
        require_type(self.batch_size, int, "batch_size", "a whole number, the samples of a rank")
        require(self.batch_size > 0, f"batch_size is {self.batch_size}; it needs 1 or more samples of a rank")
        constrained.require_constraints(constraints)
        self.constraints = dict(constraints or {})
        # An iterator is consumed once, but several plans may be made.
        self.lookups = list(lookups) if isinstance(lookups, Iterator) else lookups
        # Kernels with rows below device memory need its size and link.
        kernels = {constrained.sharded_kernel(c) for c in self.constraints.values()}
        below = {tier for kernel, (tier, _) in constrained.KERNELS.items() if kernel in kernels}
        self.their_topology = None if isinstance(topology, Topology) else topology
        self.reserved = default_reserved_share(job) if reserved is None else reserved
        self.topology = (
            topology
            if isinstance(topology, Topology)
            else topology_from_torchrec(topology, self.reserved, below)
        )
        require(
            self.their_topology is not None or reserved is None,
            f"reserved is {reserved}; it is a share of TorchRec's topology. With ShardCore's, give its devices less "
            "memory",
        )
        # TorchRec's topology says CPU, but not which one.
        if self.compute_device == "cpu" and model.setting.hardware.startswith("cpu"):
            self.topology = replace(self.topology, hardware=model.setting.hardware)
        self.model, self.algorithm, self.seed, self.budget, self.job = model, algorithm, seed, budget, job
        self.prepared = prepared
        self.problem: Problem | None = None
        self._started: list[Future[ShardingPlan]] = []
        self.our_plan: Plan | None = None
        self.unpriced: list[str] = []

    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None = None) -> ShardingPlan:
        """ShardingPlan for a module's embedding collections.

        sharders: sharders of DistributedModelParallel. None or empty: its defaults.

        Raises as `plan_for` and `to_torchrec` do, for a collection that no sharder takes, and for constraints
        that no plan can keep.
        """
        model_tables = tables_of_model(module)
        if sharders:
            require_sharders(module, sharders)
        # Sharders without a module to take have settings that do not matter.
        used = applicable_sharders(module, sharders or ())
        fused_params = optimizers.fused_params_by_table(model_tables, used)
        constraints, notes = constrained.constraints_by_problem_name(
            self.constraints, model_tables, self.compute_device, fused_params
        )
        notes += optimizers.unpriced_fused_params(used)
        for key, table in model_tables.items():
            notes += fields.unpriced_record_lines(table.config, f"config of table {key!r}")
        optimizer = optimizers.optimizer_of_tables(model_tables, used)
        job = self._job_for_plan(constraints, payloads_of_sharders(used), notes)
        # FBGEMM's own default trains tables of which nobody says more.
        # Replicas are allowed where the job states that they train under the same optimizer: FBGEMM's exact
        # optimizers are torch's of the same name.
        replicas = (optimizer or "exact_sgd").removeprefix("exact_") == job.replica_optimizer
        if not replicas and len(self.topology) > 1:
            notes.append(optimizers.replication_note(optimizer or "exact_sgd", job))
        # Ranks have equal batches.
        global_batch = self.batch_size * len(self.topology)
        bags = constrained.bags_per_sample(constraints, model_tables, self.batch_size)
        lookups = (
            constrained.lookups_per_sample(constraints, model_tables, bags)
            if self.lookups is None
            else self.lookups
        )
        data = read_lookups(lookups, self.batch_size)
        problem = problem_for(
            module,
            self.topology,
            global_batch,
            data,
            optimizer or self.model.setting.optimizer,
            constrained.search_constraints(
                constraints,
                model_tables,
                self.topology,
                self.compute_device,
                replicas or len(self.topology) == 1,
            ),
            job=job,
            bags=bags,
        )
        # Constraints add weights of lookups, and memory tiers.
        tables = constrained.apply_constraints_to_tables(problem.tables, constraints, self.topology)
        problem = replace(problem, tables=tables)
        plan = self._search_plan(problem)
        settings = constrained.kernel_settings_plan(constraints, model_tables)
        # Settings that our plan does not decide are passed on as given.
        sharding_plan = to_torchrec(plan, problem, module, self.compute_device, settings)
        notes += constrained.rewrite_to_allowed_types(sharding_plan, constraints, model_tables)
        if constrained.kinds_without_variable_batches() and any(t.strides for t in problem.tables):
            # Only the written plan says which host_row tables are cut.
            constrained.require_no_grid_shard(sharding_plan)
        require_all_modules_planned(sharding_plan, module, sharders or ())
        notes += optimizers.optimizer_notes(self.model.for_problem(problem), optimizer, problem.optimizer)
        notes += unpriced_wrappers(model_tables) + weight_gradient_notes(model_tables, self.compute_device)
        notes += constrained.pooling_notes(constraints, has_lookups=self.lookups is not None)
        if note := topologies.row_division_note(problem.topology):
            notes.append(note)
        if self.their_topology is not None:
            notes += topologies.topology_notes(self.their_topology, self.topology.memory)
        notes += unpriced_hardware(self.model.setting, self.compute_device)
        # A price beyond the measured range is a guess, so it is named.
        beyond = self._cost_model_for(problem).out_of_range(lower(plan, problem))
        notes += [f"extrapolated: {line}" for line in beyond]
        self.problem, self.our_plan = problem, plan
        has_update = profile_of_model(self.model) is not None
        self.unpriced = [*unpriced_plan_lines(sharding_plan, used, problem, has_update), *notes]
        return sharding_plan

    def _job_for_plan(
        self, constraints: Mapping[str, ParameterConstraints], payloads: tuple[str, str], notes: list[str]
    ) -> Job:
        """The job that was given, or one derived from sharders and constraints. Appends to `notes`."""
        flags = constrained.prefetch_setting_by_table(constraints)
        names = {
            value: quote_first_names([name for name, flag in flags.items() if flag is value])
            for value in flags.values()
        }
        if (job := self.job) is None:
            # Rows of all caches are fetched ahead, or of none.
            pipeline = "prefetch" if True in names else Job.pipeline
            job = Job(pipeline, forward_payload=payloads[0], backward_payload=payloads[1])
        if job.fetches_ahead and False in names:
            raise ShardCoreError(
                f"tables {names[False]} have prefetch_pipeline False, and pipeline {job.pipeline!r} fetches rows of "
                "all caches ahead: set it to True, or leave it out"
            )
        if True in names and not job.fetches_ahead:
            notes.append(
                f"tables {names[True]} have prefetch_pipeline True; they are priced under the job's pipeline "
                f"{job.pipeline!r}, which fetches no rows ahead: Job(pipeline='prefetch')"
            )
        return job

    def _cost_model_for(self, problem: Problem) -> CostModel:
        try:
            return optimizers.relabel_optimizer(self.model, problem.optimizer).for_problem(problem)
        except SettingMismatch as error:
            raise SettingMismatch(
                f"batch_size {self.batch_size} on {len(self.topology)} devices: {error}"
            ) from None

    def _search_plan(self, problem: Problem) -> Plan:
        """Plan found by the search. If none fits, the error names TorchRec's defaults that may be unintended."""
        model = self._cost_model_for(problem)
        if self.prepared and (prepared := read_prepared_plan(self.prepared, problem, model)):
            return prepared
        try:
            return sharder(self.algorithm)(problem, model, seed=self.seed, budget=self.budget)
        except Infeasible as error:
            if self.their_topology is None:
                raise
            # Memory that is added has its share that stays free.
            lacks = least_excess_plan(problem)[1] > 0
            reasons = (
                refusal_message(problem, self.reserved) if lacks else str(error),
                topologies.default_memory_note(self.their_topology),
                f"of a device's memory, {100 * self.reserved:.6g}% stays free (reserved)",
            )
            raise Infeasible("; ".join(filter(None, reasons))) from None

    def start_plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None = None) -> None:
        """Search on rank 0 in a thread while the job builds its model. `collective_plan` then waits for that plan.

        module: with the job's tables, such as the model on the meta device. Call it once the process group is there.
        """
        from shardcore.torchrec.moves.agreement import rank_and_world_size

        if rank_and_world_size()[0] == 0:
            self._started = [ThreadPoolExecutor(1).submit(self.plan, module, sharders)]

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Rank 0's ShardingPlan, broadcast to all ranks. If rank 0 fails, all ranks raise its error."""
        import torch.distributed as dist
        from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result

        def attempt() -> ShardingPlan | Exception:
            try:
                found = self._started.pop().result() if self._started else self.plan(module, sharders)
                # A plan that was started may be of another module.
                require_same_tables(found, module, "the plan")
                assert self.our_plan is not None and self.problem is not None
                topologies.require_pod_environment(self.problem.topology, self.our_plan.placements)
                return found
            except Exception as error:
                # Any error, as all ranks need to hear of it.
                return error

        group = pg or dist.GroupMember.WORLD
        require(group is not None, "collective_plan needs a process group; call init_process_group before")
        # An exception is broadcast like a plan. Raising it on rank 0 only would leave the others waiting.
        result = invoke_on_rank_and_broadcast_result(group, 0, attempt)  # type: ignore[arg-type]  # not None
        if isinstance(result, Exception):
            raise result
        return result
