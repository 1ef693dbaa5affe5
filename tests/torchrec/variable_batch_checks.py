"""Run under the TorchRec that comes first on PYTHONPATH: the bytes of a drawn plan with variable batches (VBE), on two
hosts of two processes, in which grid_shard runs tables if the version runs them so.

    python variable_batch_checks.py SEED
"""

import sys

import counted_traffic
import drawn_collections

if __name__ == "__main__":
    model = drawn_collections.variable(int(sys.argv[1]))
    assert any(p.kind == "host_row" and p.shard.width < p.shard.table.dim for p in model.plan.placements), (
        "no table is cut by rows and columns"
    )
    assert (found := counted_traffic.differences(int(sys.argv[1]), model)) == [], found
