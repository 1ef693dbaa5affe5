"""Sharders with learned policies: DreamShard (NeurIPS 2022) and AutoShard (KDD 2022).

    policy = read_policy("policy")
    plan = sharder("dreamshard", policy)(problem, model, seed=0, budget=Budget(evals=32))

A policy places one shard after another. It scores each device, and the best legal one gets the shard.
It is trained once (`train_policy`), on problems drawn from a pool, and then places problems that it never saw.
"""
