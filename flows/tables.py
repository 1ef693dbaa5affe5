"""tables: the pool of tables for all draws."""

import argparse

from prefect import flow, get_run_logger

from shardcore.io import files
from tasks import console, params, paths, services
from tasks.tables import TablesConfig, make_pool


@flow(name="tables")
def tables() -> None:
    config = params.section("tables", TablesConfig)
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
    argparse.ArgumentParser(prog="python -m flows.tables", description=__doc__).parse_args()
    services.run_flow(tables)
