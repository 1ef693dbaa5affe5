"""CostModel: the interface between a model and a search.

`at_confidence` makes a model cautious. `price` gives a model's cost of a Workload.

Shapes: N shards, F features, G ops, C channels, L traffic slots, D devices.
... leading dimensions, for several plans at once.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.step_cost import EQUAL, PredictedCost
from shardcore.core.types import Plan, Problem, Setting, Shard
from shardcore.core.validation import require, require_type, short_repr
from shardcore.cost.heads import CompiledHead, Head
from shardcore.step.exchanges import CommCost, ExchangeLaw
from shardcore.step.kinds import CHANNELS, Channel
from shardcore.step.lower import Workload, lower
from shardcore.tables.host_rows import with_shared_cache_load_factors

Step = TypeVar("Step", Problem, Workload)


def round_encodings(codes: np.ndarray) -> np.ndarray:
    """Encodings rounded to the 24 significant bits of float32, as float64.

    The last bits of a matrix product or a logarithm depend on the processor. Searches amplify them: one trial that is
    accepted elsewhere leads to another plan. Rounded encodings are the same on all processors.
    """
    return codes.astype(np.float32).astype(float)


@dataclass(frozen=True)
class PredictedQuantity:
    """A quantity of a step whose ms a correction multiplies.

    channel: channel of an exchange. None: the quantity is of lookups.
    direction: "forward" or "backward".
    """

    channel: Channel | None
    direction: str

    @property
    def family(self) -> str:
        return COMPUTE if self.channel is None else EXCHANGE

    @property
    def label(self) -> str:
        return f"{self.channel.description if self.channel else 'lookups'} {self.direction}"


COMPUTE, EXCHANGE = "lookups", "exchanges"
"""Families of quantities."""
LOOKUPS = tuple(PredictedQuantity(None, direction) for direction in ("forward", "backward"))
QUANTITIES = (
    *LOOKUPS,
    *(
        PredictedQuantity(channel, direction)
        for channel in CHANNELS
        for direction in channel.definition.directions
    ),
)


@dataclass(frozen=True)
class CorrectionFactor:
    """Measured correction factor on the predicted ms of a quantity.

    value: exp of the posterior mean.
    sd: standard deviation of the posterior of its logarithm.
    units: ranks and steps that measured it. 0: only its family did.
    latency_ms: latency of each run, on top of the factor.
    """

    value: float
    sd: float
    units: int
    latency_ms: float = 0.0


@dataclass(frozen=True)
class UncertainRates:
    """Rates of a model that one kind of measurement would show.

    measured: key of profile.MEASUREMENTS.
    band: relative standard error of a step's ms, without its dense part, that these rates cause.
    models: the model with all of them a standard error faster, and slower.
    """

    measured: str
    band: float
    models: tuple[CostModel, ...]


@runtime_checkable
class CostModel(ExchangeLaw, Protocol):
    """Costs of fused ops and collectives, in ms. All methods are pure, and a model is hashable.

    An op costs its heads' ms of the sum of its shards' encodings. So a search adds and subtracts rows of F numbers,
    and never runs a network twice on a shard.

    setting: what the model was measured for, or is used for.
    """

    setting: Setting

    @abstractmethod
    def for_problem(self, problem: Problem) -> CostModel:
        """The cost model at a problem's batch and with its job's payloads.

        Raises SettingMismatch for a batch beyond those that it was measured at.
        """

    @abstractmethod
    def encode(self, shards: Sequence[Shard], batch: int | None = None) -> np.ndarray:
        """[N, F] float64 encodings of shards in an op over `batch` samples (None: the setting's).

        Those of `round_encodings`.
        """

    @property
    @abstractmethod
    def heads(self) -> Sequence[Head]:
        """The heads of an op's cost, whose ms add up. Each takes some consecutive entries of an encoding."""

    @abstractmethod
    def out_of_range(self, workload: Workload) -> list[str]:
        """Sentences on the parts of a step beyond the model's measured range. Empty if there are none."""

    def at_confidence(self, confidence: float | None) -> CostModel:
        """The model that prices an op by a quantile: a measurement lies below with this probability.

        None: the mean. Its `op_part_ms` and `compiled_op_ms` raise ShardCoreError if the model does not know that
        confidence.
        """
        require(
            confidence is None,
            f"model {type(self).__name__} has no quantiles; confidence needs a trained model",
        )
        return self

    def corrected_by(
        self, factors: Mapping[PredictedQuantity, CorrectionFactor], lineage: Mapping[str, Any] | None = None
    ) -> CostModel:
        """The cost model with its ms multiplied by factors of traced steps, and their latencies added.

        lineage: added to its provenance, as "job". Of it, the sources of a profile's rates name the job.

        Raises ShardCoreError for a model of a kind that has no rates to multiply.
        """
        raise ShardCoreError(f"model is a {type(self).__name__}; traces correct trained models and profiles")

    @property
    def dense_tflops(self) -> float | None:
        """TFLOP/s that dense parts of models reach on the hardware. None: the cost model does not know it."""
        return None

    def uncertain_rates(self, workload: Workload) -> Sequence[UncertainRates]:
        """The rates that each kind of measurement would show, of a model that was not measured here; else ()."""
        return ()

    @property
    def bounding_model(self) -> CostModel | None:
        """The model of mean costs, for lower bounds. None if its mean costs exceed the model's own."""
        return self.at_confidence(None) if all(head.error_quantile >= 0 for head in self.heads) else None

    # --- given by the heads ---------------------------------------------------------------------------------

    def _split_by_head(self, sums: np.ndarray) -> Iterator[tuple[Head, np.ndarray]]:
        """Each head with its part [..., F] of summed encodings."""
        sums, first = np.asarray(sums, dtype=float), 0
        for head in self.heads:
            yield head, sums[..., first : first + head.encoding_width]
            first += head.encoding_width

    def op_part_ms(self, sums: np.ndarray) -> np.ndarray:
        """[..., 3] ms of ops from summed encodings [..., F]: forward, backward, and on the link to host memory. 0 for
        zeros.

        Of the link: what ops read of host memory before their update, if caches fetch ahead (`fetch_wait_ms`). What
        caches fetch then is in no other part. 0 in all other jobs. Forward is 0 where a model does not tell it from
        backward, which is the costlier one.
        """
        return reduce(np.add, (head.op_part_ms(own) for head, own in self._split_by_head(sums)))

    def op_ms(self, sums: np.ndarray) -> np.ndarray:
        """[...] ms, forward + backward, of ops from summed encodings [..., F]."""
        return self.op_part_ms(sums)[..., :2].sum(-1)

    def compiled_op_ms(self) -> CompiledHead:
        """The function `op_ms` for one op at a time, compiled, for searches that price millions of ops."""
        from shardcore.cost import compiled  # numba compiles on import

        one, *others = heads = [head.compiled_op_ms() for head in self.heads]
        if not others:
            return one
        # Of each head its number, features and parameters, in front of all parameters (compiled.multi_head_op_ms).
        layout = [
            (compiled.HEADS.index(made.head), head.encoding_width, len(made.parameters))
            for head, made in zip(self.heads, heads, strict=True)
        ]
        parameters, fetched = (
            np.concatenate([[len(heads)], np.ravel(layout), *of_heads])
            for of_heads in zip(*(made[1:] for made in heads), strict=True)
        )
        return CompiledHead(compiled.compile_head(compiled.multi_head_op_ms), parameters, fetched)

    def launch_ms(self) -> float:
        """ms of the launch of any non-empty op, by mean costs."""
        return min(head.launch_ms() for head in self.heads)

    def rate_lower_bounds(self, least: np.ndarray) -> np.ndarray:
        """[..., F] lower bounds of an op's ms for a unit of each entry of its encoding. They do not fall as `least`
        grows.

        head(sums) >= launch_ms() + rates · sums, wherever sums >= least, of non-empty ops and a model of means.
        """
        return np.concatenate([head.rate_lower_bounds(own) for head, own in self._split_by_head(least)], -1)


def at_confidence(model: CostModel, confidence: float | None) -> CostModel:
    """The model at a confidence; the model unchanged for a confidence of None or 0.

    So a search is not drawn to ops whose cost is uncertain. Raises ShardCoreError for a model without quantiles.
    """
    # None and 0 both mean: no caution.
    return model.at_confidence(confidence) if confidence else model


def group_op_ms(groups: Sequence[Sequence[Shard]], model: CostModel, batch: int | None = None) -> np.ndarray:
    """[G] ms of groups of shards, each run as one fused op. 0 for an empty group."""
    if not any(groups):
        return np.zeros(len(groups))
    # An empty group has no op, so no launch: a row of zeros costs 0.
    return np.asarray(model.op_ms(summed_encodings(groups, model, batch)), dtype=float)


def summed_encodings(
    groups: Sequence[Sequence[Shard]], model: CostModel, batch: int | None = None
) -> np.ndarray:
    """[..., G, F] the sum of the encodings of each group of shards. At least one group is not empty."""
    codes = model.encode([s for g in groups for s in g], batch)
    sums = np.zeros((*codes.shape[:-2], len(groups), codes.shape[-1]))
    group = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
    # By the last axis but one, whatever is in front.
    np.add.at(np.moveaxis(sums, -2, 0), group, np.moveaxis(codes, -2, 0))
    return sums


def exposed_input_ms(comm: CommCost, job: Job) -> np.ndarray:
    """[...] ms by which the exchange of ids makes a step longer.

    Devices meet in this exchange, so the longest transfer counts. The dense part hides transfers, which then
    cost nothing. It hides no work: the same device runs both.
    """
    # Work of the slowest device is never hidden. Transfers are, as far as the dense part lasts.
    return np.maximum(comm.input_work_ms.max(-1), comm.input_ms.max(-1) - job.id_overlap_ms)


def fetch_wait_ms(fetched_ms: np.ndarray, busy_ms: np.ndarray, job: Job) -> np.ndarray:
    """[..., D] ms that devices wait for rows that their caches fetch ahead.

    fetched_ms: [..., D] of each device's ops together: of the link, and backward (CostModel.op_part_ms).
    busy_ms: [..., D] compute and exchanges, without what caches fetch.

    PrefetchTrainPipelineSparseDist fetches a batch's rows on a stream of their own, while the batch before is
    looked up, exchanged, and in the dense part. FBGEMM lets no update of rows run beside: its hook before
    backward waits for the fetch (`_update_cache_counter_and_locations`), and the next fetch waits for that
    backward (`_sync_stream_post_backward`). So of two chains, the longer one counts:

        lookups, exchanges, dense part, update
        fetch, update

    Tables without a cache are looked up over the same link, which a fetch then does not have. Ids come before
    both. A law by construction (torchrec 1.8.0, fbgemm_gpu 1.8.0): no GPU ran it.
    """
    return np.maximum(0.0, fetched_ms - busy_ms - job.dense_ms)


def step_ms(
    compute_ms: np.ndarray, comm: CommCost, job: Job, fetched_ms: np.ndarray | float = 0.0
) -> np.ndarray:
    """[...] ms of a step, dense part included. compute_ms: [..., D]. fetched_ms: as in `fetch_wait_ms`."""
    busy_ms = compute_ms + comm.total_ms
    # Waiting is part of a device's sum, so the largest sum is the step.
    last_ms = (busy_ms + fetch_wait_ms(np.asarray(fetched_ms), busy_ms, job)).max(-1)
    return last_ms + exposed_input_ms(comm, job) + job.dense_ms


def require_model(model: object) -> None:
    """Raise ShardCoreError unless `model` is a hashable cost model."""
    # The runtime check of a protocol sees whether its methods exist, not their types.
    # Its terms are cached by model, so it needs a hash (exchanges.cached_channel_terms).
    if not (isinstance(model, CostModel) and isinstance(model, Hashable)):
        raise ShardCoreError(
            f"model is {short_repr(model)}; it needs to be a cost model, as load_model(folder) gives, and hashable"
        )


def price(workload: Workload, model: CostModel) -> PredictedCost:
    """The predicted cost of one training step of a workload, under a cost model. Its `extrapolated` names what was not
    measured.
    """
    require_type(workload, Workload, "workload", "a Workload, as lower(plan, problem) gives")
    require_model(model)
    # Unmeasured parts are reported, not refused.
    unmeasured = (*_setting_mismatches(workload, model.setting), *model.out_of_range(workload))
    return replace(_predict_cost(workload, model), extrapolated=unmeasured)


def predicted_total_ms(workload: Workload, model: CostModel) -> float:
    """The predicted ms of one training step, without a check of the measured range."""
    return _predict_cost(workload, model).total_ms


def device_phase_ms(workload: Workload, model: CostModel) -> np.ndarray:
    """[3, ..., D] ms of each device's ops: forward, backward, and on the link to host memory."""
    # Devices that run the same shards share an Op. It is priced once, and all of a batch in one call.
    ops_by_id = {id(op): op for ops in workload.ops for op in ops}
    row_of, priced, devices = dict[int, int](), list[np.ndarray](), workload.topology.devices
    if not ops_by_id:
        return np.zeros((3, len(devices)))
    for batch in dict.fromkeys(op.batch for op in ops_by_id.values()):
        some = {
            i: with_shared_cache_load_factors(op.shards, batch)
            for i, op in ops_by_id.items()
            if op.batch == batch
        }
        row_of |= zip(some, itertools.count(len(row_of)), strict=False)
        priced.append(model.op_part_ms(summed_encodings([*some.values()], model, batch)))
    of_ops = np.moveaxis(np.concatenate(priced, -2), -2, 0)
    ms = np.zeros((len(devices), *of_ops.shape[1:]))
    device, row = np.transpose([(d, row_of[id(op)]) for d, ops in enumerate(workload.ops) for op in ops])
    np.add.at(ms, device, of_ops[row])
    # Speed scales compute, not communication. An op's time on the link scales with it, as it does in `op_ms`.
    speed = np.array([device.speed for device in devices])
    return np.moveaxis(ms, (-1, 0), (0, -1)) / speed


def with_predicted_dense_ms(step: Step, model: CostModel) -> Step:
    """A problem or workload whose dense part has ms, in place of its operations, at a model's rate of them.

    Unchanged if it states none, or if the model knows no rate (CostModel.dense_tflops).
    """
    if step.job.dense_mflops is None or model.dense_tflops is None:
        return step
    # Millions of operations in a TFLOP/s are microseconds.
    of_sample_ms = step.job.dense_mflops / model.dense_tflops * 1e-3
    forward_ms = of_sample_ms * (step.global_batch / len(step.topology))
    # Backward, a layer has gradients of its input and of its weights: a product as large as forward for each.
    times = {"dense_forward_ms": forward_ms, "dense_backward_ms": 2 * forward_ms}
    return replace(step, job=replace(step.job, dense_mflops=None, **times))


def _predict_cost(workload: Workload, model: CostModel) -> PredictedCost:
    """The predicted cost of one training step, without a check of the measured range."""
    workload = with_predicted_dense_ms(workload, model)
    forward, backward, link = device_phase_ms(workload, model)
    # Collectives depend on when devices arrive, so compute comes first.
    comm = model.comm_cost(workload.traffic, forward + backward, workload.topology)
    fetch_wait = fetch_wait_ms(link + backward, forward + backward + comm.total_ms, workload.job)
    return PredictedCost(
        forward_compute_ms=tuple(forward.tolist()),
        backward_compute_ms=tuple(backward.tolist()),
        forward_comm_ms=tuple(comm.forward_ms.tolist()),
        backward_comm_ms=tuple(comm.backward_ms.tolist()),
        waiting_ms=tuple((comm.waiting_ms + fetch_wait).tolist()),
        fetch_wait_ms=tuple(fetch_wait.tolist()),
        link_ms=tuple(link.tolist()),
        # All devices wait for ids, so each has the same ms.
        input_ms=(float(exposed_input_ms(comm, workload.job)),) * len(forward),
        dense_ms=workload.job.dense_ms,
    )


def _setting_mismatches(workload: Workload, setting: Setting) -> Iterator[str]:
    """Sentences on precisions and payloads of a workload that differ from the model's."""
    # A composite's setting joins the names of its precisions by "+".
    used = {s.table.precision for ops in workload.ops for op in ops for s in op.shards}
    if other := sorted(used - set(setting.precision.split("+"))):
        yield f"weights are {', '.join(other)}; the model was measured with {setting.precision}"
    own, priced = workload.job.payloads, setting.payloads
    if own != priced:
        yield (
            f"payloads are {' and '.join(own.values())}; the model prices "
            f"{' and '.join(priced.values())} (use model.for_problem(problem))"
        )


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """A plan with its workload (one training step) and the cost that a model predicts."""

    plan: Plan
    workload: Workload
    cost: PredictedCost


def price_plan(plan: Plan, problem: Problem, model: CostModel, fits: bool = True) -> PricedPlan:
    """Lower a plan to a training step and price it. Raises what `lower` raises."""
    workload = with_predicted_dense_ms(lower(plan, problem, fits), model)
    return PricedPlan(plan, workload, price(workload, model))


# --- comparisons of costs -----------------------------------------------------------------------------------
# Equal costs are often computed by sums in another order. Which one is less in its last bits means nothing, and must
# not decide between plans. So costs that differ by less than EQUAL of themselves are equal, and the first one counts.


def is_less(cost: Any, other: Any, equal: float = EQUAL) -> Any:
    """[...] bool: whether costs are below `other` by more than rounding. equal: relative difference up to which they
    are equal.
    """
    return cost + equal * np.abs(cost) < other


def is_minimum(costs: np.ndarray, equal: float = EQUAL) -> np.ndarray:
    """[..., N] bool: costs equal to the least one along the last axis. equal: relative difference of equal costs."""
    return ~is_less(costs.min(-1, keepdims=True), costs, equal)


def first_argmin(costs: Any) -> int:
    """Index of the first of the least costs [N]. Costs that differ by rounding only are equal."""
    return int(is_minimum(np.asarray(costs, dtype=float)).argmax())
