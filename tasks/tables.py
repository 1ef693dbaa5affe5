"""The pool of tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefect import task

from shardcore.core.types import Table
from shardcore.io.dlrm_datasets import dlrm_datasets_pool
from shardcore.tables.generate import PoolConfig, generate_pool
from shardcore.tables.public import public_pool


@dataclass(frozen=True)
class TablesConfig:
    """The pool of tables.

    source: "generated" (calibrated to dlrm_datasets), the name of a public list, or a file of dlrm_datasets.
    tables: number of generated tables.
    seed: seed of the generated pool.
    dim: dim of tables until a draw gives them another. A public list has dims of its own.
    """

    source: str = "generated"
    tables: int = 856
    seed: int = 0
    dim: int = 64

    def __post_init__(self) -> None:
        self.generated()

    def generated(self) -> PoolConfig:
        return PoolConfig(self.tables, self.seed, self.dim)


@task
def make_pool(config: TablesConfig) -> tuple[Table, ...]:
    if config.source == "generated":
        return generate_pool(config.generated())
    if Path(config.source).suffix in (".pt", ".gz") or Path(config.source).exists():
        return dlrm_datasets_pool(config.source, dim=config.dim)
    return public_pool(config.source)
