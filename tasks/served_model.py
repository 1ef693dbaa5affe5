"""The cost model as an MLflow pyfunc (models from code), for other programs. ShardCore itself reads the model's files.

Input: groups of shards, each run as one fused op. A group is {"shards": [...], "batch": samples of the op}. The default
batch is the setting's. A shard is {"table": as in problem files, "rows": [low, high], "columns": [low, high]}. The
default is all rows and columns.

Output, for each group: "ms" of forward + backward; "forward_ms", the part of forward; "low_ms" and "high_ms", between
which 90% of measurements are; and "extrapolated", sentences on what is beyond the measured range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc.model import PythonModel
from pydantic import BaseModel, SkipValidation

from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting, Shard
from shardcore.core.validation import MOST_BATCH, shown
from shardcore.cost import composite
from shardcore.cost.neural import NeuralModel
from shardcore.io import files, schema
from shardcore.step.kinds import CHANNELS, WHOLE_ROWS
from shardcore.step.lower import Op, Workload, is_sequence

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

    def sent(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in self.model_fields_set}


# --- the model ----------------------------------------------------------------------------------------------


class ServedCostModel(PythonModel):
    def load_context(self, context: Any) -> None:
        self._model = composite.load(context.artifacts["model"])

    def predict(  # pyright: ignore[reportIncompatibleMethodOverride]  # MLflow's declares no result
        self, context: Any, model_input: list[GroupInput], params: Any = None
    ):
        """A dictionary for each group, as above. Raises MlflowException (HTTP 400) naming the group."""
        try:
            groups = [_group(g.sent(), f"group {i}", self._model.setting) for i, g in enumerate(model_input)]
            return [_answer(self._model, *g) for g in groups]
        except ShardCoreError as error:
            raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from None


def _answer(
    model: NeuralModel | composite.Composite, shards: tuple[Shard, ...], batch: int
) -> dict[str, Any]:
    sums = model.encode(shards, batch).sum(0)
    forward_ms, backward_ms, _ = model.parts(sums).tolist()
    low, high = (
        float(model.at_confidence(level).head(sums)) for level in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    )
    ops = (Op(WHOLE_ROWS.name, shards, batch),) if shards else ()
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


def _group(data: Any, what: str, setting: Setting) -> tuple[tuple[Shard, ...], int]:
    """The shards of a group and the batch of its op."""
    _check_keys(data, what, "shards", "batch")
    batch = data.get("batch", setting.batch)
    if not (schema.is_whole(batch) and 1 <= batch <= MOST_BATCH):
        raise ShardCoreError(
            f"{what} has batch {shown(batch)}; it needs a whole number of samples, 1 to {MOST_BATCH}"
        )
    if not isinstance(data["shards"], list):
        raise ShardCoreError(f"{what} has shards {shown(data['shards'])}; it needs a list")
    shards = tuple(_shard(s, f"{what}, shard {i}", setting) for i, s in enumerate(data["shards"]))
    try:
        is_sequence(shards)
    except ShardCoreError as error:
        raise ShardCoreError(f"{what}: {error}") from None
    return shards, batch


def _shard(data: Any, what: str, setting: Setting) -> Shard:
    _check_keys(data, what, "table", "rows", "columns")
    table = files.table_from_json(data["table"], what)
    if table.precision not in setting.precision.split("+"):
        raise SettingMismatch(
            f"{what}: table {table.name!r} is {table.precision}; the model's tables are {setting.precision}"
        )
    if table.in_host_memory:
        raise ShardCoreError(
            f"{what}: table {table.name!r} has load_factor {table.load_factor:g}; a group "
            "has no link to host memory that could be priced, so it needs 1"
        )
    ends = []
    for name, size in (("rows", table.rows), ("columns", table.dim)):
        both = data.get(name, [0, size])
        if not (isinstance(both, list) and len(both) == 2 and all(map(schema.is_whole, both))):
            raise ShardCoreError(f"{what} has {name} {shown(both)}; it needs [low, high], two whole numbers")
        ends += both
    try:
        return Shard(table, *ends)
    except ShardCoreError as error:
        raise ShardCoreError(f"{what}: {error}") from None


def _check_keys(data: Any, what: str, needed: str, *optional: str) -> None:
    if not isinstance(data, dict):
        raise ShardCoreError(f"{what} is {shown(data)}; it needs to be an object with the key {needed!r}")
    unknown = sorted(map(shown, set(data) - {needed, *optional}))
    if unknown:
        raise ShardCoreError(
            f"{what} has an unknown key {unknown[0]}; known are {', '.join((needed, *optional))}"
        )
    if needed not in data:
        raise ShardCoreError(f"{what} lacks the key {needed!r}")


set_model(ServedCostModel())
