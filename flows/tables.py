"""tables: the pool of tables for all draws."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefect import flow, get_run_logger, task

from flows import program
from shardcore.core.types import Table
from shardcore.io import files
from shardcore.tables.generate import PoolConfig, generate_pool
from shardcore.tables.public import public_pool
from tasks import console, params, paths


@dataclass(frozen=True)
class TablesConfig(PoolConfig):
    """The pool of tables: a generated one, or another source.

    source: generated (calibrated to dlrm_datasets), a list of shardcore/tables/public_tables.json, or a file of
      dlrm_datasets (.pt.gz)
    """

    source: str = "generated"


@task
def make_pool(config: TablesConfig) -> tuple[Table, ...]:
    if config.source == "generated":
        return generate_pool(config)
    if Path(config.source).suffix in (".pt", ".gz") or Path(config.source).exists():
        from shardcore.io.dlrm_datasets import read_dlrm_datasets_pool  # imports torch, which takes seconds

        return read_dlrm_datasets_pool(config.source, dim=config.dim)
    return public_pool(config.source)


@flow(name="tables")
def tables() -> None:
    config = params.read_section("tables", TablesConfig)
    pool = make_pool(config)
    files.write_pool(paths.POOL, pool)
    live = [t for t in pool if t.pooling > 0]
    get_run_logger().info(
        "%d tables (%d empty), %.1f lookups a sample, %.1f GiB of weights at dim %d",
        len(pool),
        len(pool) - len(live),
        sum(t.pooling for t in pool),
        sum(t.bytes for t in pool) / 2**30,
        pool[0].dim,
        extra=console.RESULT,
    )


if __name__ == "__main__":
    program.run_as_program(tables)
