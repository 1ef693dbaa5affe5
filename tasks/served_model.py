"""The cost model as an MLflow pyfunc (models from code), for other programs. ShardCore itself reads the model's files.

Input: groups of shards, each run as one fused op. A group is {"shards": [...], "batch": samples of the op}. The default
batch is the setting's. A shard is {"table": as in problem files, "rows": [low, high], "columns": [low, high]}. The
default is all rows and columns.

Output, for each group: "ms" of forward + backward; "forward_ms", the part of forward; "low_ms" and "high_ms", between
which 90% of measurements are; and "extrapolated", sentences on what is beyond the measured range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc.model import PythonModel
from pydantic import BaseModel, SkipValidation

from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting, Shard
from shardcore.core.validation import MOST_BATCH, MOST_ROWS, Record, Rule, number_within
from shardcore.cost import composite
from shardcore.cost.neural import NeuralModel
from shardcore.io import files, schema
from shardcore.step.kinds import CHANNELS, kind_on_one_device
from shardcore.step.lower import Op, Workload, is_sequence_op

CONFIDENCE = 0.9


# --- the signature that MLflow shows. MLflow checks nothing of it: errors below name what is wrong ----------


class TableInput(BaseModel):
    """Required keys of a table. Others are as in problem files."""

    name: str
    rows: int
    dim: int
    pooling: float


class ShardInput(BaseModel):
    table: TableInput
    rows: list[int] | None = None
    columns: list[int] | None = None


class GroupInput(BaseModel, extra="allow"):
    shards: SkipValidation[list[ShardInput]] = []
    batch: SkipValidation[int | None] = None

    def given_fields(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in self.model_fields_set}


# --- the model ----------------------------------------------------------------------------------------------


class ServedCostModel(PythonModel):
    def load_context(self, context: Any) -> None:
        self._model = composite.load_models(context.artifacts["model"])

    def predict(  # pyright: ignore[reportIncompatibleMethodOverride]  # MLflow's declares no result
        self, context: Any, model_input: list[GroupInput], params: Any = None
    ):
        """Predict the cost of each group of shards. Raises MlflowException (HTTP 400) for an invalid group."""
        try:
            groups = [
                _read_group(g.given_fields(), f"group {i}", self._model.setting)
                for i, g in enumerate(model_input)
            ]
            return [_predict_group(self._model, *g) for g in groups]
        except ShardCoreError as error:
            raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from None


def _predict_group(
    model: NeuralModel | composite.Composite, shards: tuple[Shard, ...], batch: int
) -> dict[str, Any]:
    sums = model.encode(shards, batch).sum(0)
    forward_ms, backward_ms, _ = model.op_part_ms(sums).tolist()
    low, high = (
        float(model.at_confidence(level).op_ms(sums))
        for level in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    )
    ops = (Op(kind_on_one_device(shards[0].table).name, shards, batch),) if shards else ()
    # out_of_range takes a workload, so the group gets a made-up device.
    device = Topology((Device(1),), model.setting.hardware)
    alone = Workload((ops,), np.zeros((len(CHANNELS), 1)), (0,), device, batch)
    return {
        "ms": forward_ms + backward_ms,
        "forward_ms": forward_ms,
        "low_ms": low,
        "high_ms": high,
        "extrapolated": model.out_of_range(alone),
    }


# --- input --------------------------------------------------------------------------------------------------


_LIMITS = Rule(
    lambda ends: 0 <= min(ends) <= max(ends) <= MOST_ROWS, f"it needs [low, high], 0 to {MOST_ROWS:,}"
)
Ends = Annotated[tuple[int, int], _LIMITS]


@dataclass(frozen=True)
class ShardData(Record):
    """A shard as it is sent. rows, columns: lowest, and the end. None: all."""

    table: Mapping[str, Any]
    rows: Ends | None = None
    columns: Ends | None = None


@dataclass(frozen=True)
class GroupData(Record):
    """A group as it is sent. batch: samples of the op. None: the setting's."""

    shards: tuple[ShardData, ...]
    batch: Annotated[int | None, number_within(1, MOST_BATCH)] = None


def _read_group(data: Any, what: str, setting: Setting) -> tuple[tuple[Shard, ...], int]:
    """Parse a group of shards of a request: the shards, and the batch of their fused op."""
    sent = schema.build_record(GroupData, data, what)
    shards = tuple(_read_shard(s, f"{what}, shard {i}", setting) for i, s in enumerate(sent.shards))
    with schema.prefix_errors(what):
        is_sequence_op(shards)
    return shards, sent.batch or setting.batch


def _read_shard(sent: ShardData, what: str, setting: Setting) -> Shard:
    table = files.table_from_json(sent.table, what)
    if table.precision not in setting.precision.split("+"):
        raise SettingMismatch(
            f"{what}: table {table.name!r} is {table.precision}; the model's tables are {setting.precision}"
        )
    if table.in_host_memory:
        raise ShardCoreError(
            f"{what}: table {table.name!r} has load_factor {table.load_factor:g}; a group "
            "has no link to host memory that could be priced, so it needs 1"
        )
    with schema.prefix_errors(what):
        return Shard(table, *(sent.rows or (0, table.rows)), *(sent.columns or (0, table.dim)))


set_model(ServedCostModel())
