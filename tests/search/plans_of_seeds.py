"""Prints the plans of all sharders on some problems, as JSON by problem and sharder, for test_one_plan_per_seed.

python plans_of_seeds.py MODEL [ROWS]: a trained model's folder, and rows computed at once, if not the usual numbers.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = map(str, (Path(__file__).parent, Path(__file__).parents[1]))

from cuts import MODEL, draw_problem, on_two_hosts  # noqa: E402
from policies import untrained  # noqa: E402

from shardcore.cost import neural  # noqa: E402
from shardcore.search import LEARNED, SHARDERS, Budget, beam, sharder  # noqa: E402
from shardcore.search.bound.lower_bound import prove_lower_bound  # noqa: E402
from shardcore.step import options  # noqa: E402


def main(folder: str, rows: str = "") -> None:
    if rows:
        beam._ROWS_AT_ONCE = options._ENCODED_AT_ONCE = neural._AT_ONCE = int(rows)
    trained = neural.load(folder)
    plans = {}
    for seed, n_tables in ((5, 8), (11, 16)):
        drawn = draw_problem(seed, n_tables=n_tables)
        for problem in (drawn, on_two_hosts(drawn)):
            setting = trained.setting
            measured = replace(
                problem,
                name=f"{problem.name}-measured",
                topology=replace(problem.topology, hardware=setting.hardware),
                global_batch=setting.batch,
                optimizer=setting.optimizer,
            )
            for of, model in ((problem, MODEL), (measured, trained)):
                where = f"{of.name} {seed} on {len(of.topology.hosts)}"
                model = model.for_problem(of)
                plans[f"{where}: bound"] = f"{prove_lower_bound(of, model).proved_ms or 0.0:.9g}"
                # TorchRec's planner takes as long as all others together.
                for name in (x for x in (*SHARDERS, *LEARNED) if x != "torchrec" or n_tables == 8):
                    policy = None
                    if name in LEARNED:
                        policy = replace(untrained(LEARNED[name][0]), setting=model.setting)
                    budget = Budget(evals=20 if policy else 1500)
                    plan = sharder(name, policy)(of, model, seed=seed, budget=budget)
                    plans[f"{where}: {name}"] = repr(
                        [
                            (
                                p.kind,
                                p.shard.table.name,
                                p.shard.row_lo,
                                p.shard.col_lo,
                                p.shard.col_hi,
                                p.devices,
                            )
                            for p in plan.placements
                        ]
                    )
    print(json.dumps(plans))


if __name__ == "__main__":
    main(*sys.argv[1:])
