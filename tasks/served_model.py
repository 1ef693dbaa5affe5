"""The cost model as an MLflow pyfunc (models from code), for others' convenience: ShardCore itself reads the files.

Input: rows with the key "tables": the tables of one fused op, as JSON objects of the problem format. Output: its ms.
"""

import json

import mlflow
from mlflow.pyfunc import PythonModel


class ServedCostModel(PythonModel):
    def load_context(self, context):
        from shardcore.cost import neural

        self._model = neural.load(context.artifacts["model"])

    def predict(self, context, model_input: list[str], params=None) -> list[float]:
        """Forward + backward ms of groups, each the JSON text of a list of tables."""
        from shardcore.cost.model import group_costs
        from shardcore.files import table_from_json
        from shardcore.types import Shard

        groups = [[Shard.whole(table_from_json(t, "input")) for t in json.loads(row)] for row in model_input]
        return [float(c) for c in group_costs(groups, self._model)]


mlflow.models.set_model(ServedCostModel())
