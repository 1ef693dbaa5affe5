"""Two gloo ranks train a table, save it, and load it under each other kind of sharding. A line of JSON each.

    python tests/plans/changed_kinds.py sgd rowwise_adagrad adagrad

weights: whether torch.distributed.checkpoint and load_state_dict bring back the same.
state: "loads", "fails", or "lost" where the loaded optimizer has none.
The last line is of a table that has grown since.
"""

import itertools
import json
import logging
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed._shard.sharded_tensor import ShardedTensor

KINDS = ("table_wise", "column_wise", "row_wise", "data_parallel")


def model(kind: str, optimizer: str, rows: int = 10):
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.model_parallel import get_default_sharders
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim import RowWiseAdagrad

    tables = [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=8, feature_names=["f"])]
    module = torch.nn.ModuleDict({"s": EmbeddingBagCollection(device=torch.device("meta"), tables=tables)})
    made = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    _apply_optimizer_in_backward(made[optimizer], module.parameters(), {"lr": 0.1})
    how = {
        "table_wise": plans.table_wise(rank=0),
        "row_wise": plans.row_wise(),
        "column_wise": plans.column_wise(ranks=[0, 1]),
        "data_parallel": plans.data_parallel(),
    }[kind]
    plan = plans.construct_module_sharding_plan(
        module["s"], {"t": how}, local_size=2, world_size=2, device_type="cpu"
    )
    return DistributedModelParallel(
        module,
        ShardingEnv.from_process_group(dist.group.WORLD),
        torch.device("cpu"),
        ShardingPlan({"s": plan}),
        get_default_sharders(),
    )


def train(sharded) -> None:
    from torchrec import KeyedJaggedTensor

    ids = KeyedJaggedTensor(["f"], torch.randint(0, 10, (6,)), lengths=torch.tensor([2, 2, 2]))
    sharded.module["s"](ids).wait().values().sum().backward()


def whole(sharded) -> torch.Tensor:
    [weight] = (v for k, v in sharded.state_dict().items() if k.endswith("t.weight"))
    if not isinstance(weight, ShardedTensor):
        return weight.detach().clone()
    found = torch.zeros(*weight.size())
    weight.gather(0, found if dist.get_rank() == 0 else None)
    dist.broadcast(found, 0)
    return found


def folder() -> str:
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path, 0)
    return path[0]


def loads(saved, state) -> bool:
    path = folder()
    dcp.save(saved, checkpoint_id=path)
    try:
        dcp.load(state, checkpoint_id=path)
        return True
    except dcp.api.CheckpointException:
        return False


def change(before: str, after: str, optimizer: str, rows: int = 10) -> dict[str, object]:
    old, new = model(before, optimizer), model(after, optimizer, rows)
    train(old)
    state = {"model": new.state_dict()}
    loaded = loads({"model": old.state_dict()}, state)
    if loaded:
        new.load_state_dict(state["model"])
    states = old.fused_optimizer.state_dict(), new.fused_optimizer.state_dict()
    fits = loads({"state": states[0]}, {"state": states[1]})
    kept = [any(x["state"].values()) for x in states]
    return {
        "before": before,
        "after": after,
        "optimizer": optimizer,
        "rows": rows,
        "weights": loaded and (rows != 10 or torch.equal(whole(old), whole(new))),
        "state": "fails" if not fits else "lost" if kept[0] and not kept[1] else "loads",
    }


def rank(number: int, store: str, optimizers: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=2)
    torch.manual_seed(number)
    asked = [(*x, 10) for x in itertools.product(KINDS, KINDS, optimizers)]
    for one in [*asked, ("table_wise", "table_wise", optimizers[0], 12)]:
        found = change(*one)
        if number == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()


if __name__ == "__main__":
    mp.spawn(rank, (f"file://{tempfile.mktemp()}", sys.argv[1:]), nprocs=2)
