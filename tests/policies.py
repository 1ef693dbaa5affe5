"""Policies with random weights: what plans have to be must not depend on how well a policy was trained."""

import numpy as np

from shardcore.core.types import Setting
from shardcore.search.learned.policy import NETS, Policy


def untrained(name: str, seed: int = 0, hardware: str = "made-up") -> Policy:
    rng = np.random.default_rng(seed)
    weights = {
        k: (rng.uniform(-1, 1, shape) * shape[0] ** -0.5).astype(np.float32)
        for k, shape in NETS[name].shapes.items()
    }
    weights |= {
        "low": np.full(21, -50, np.float32),
        "high": np.full(21, 50, np.float32),
        "mean": np.zeros(21, np.float32),
        "sd": np.full(21, 5, np.float32),
        "scale_ms": np.ones(1, np.float32),
    }
    return Policy(name, Setting(hardware, 48), weights)
