"""ProfileModel keeps the promises of a cost model."""

from shardcore.cost.profile import load_profile
from shardcore.testing.cost_models import CostModelConformance


class TestProfile(CostModelConformance):
    def model(self):
        return load_profile("nvidia-h100-sxm").model()
