"""Random plans that TorchRec trains: drawn, taken there and back, and trained with DistributedModelParallel
on gloo processes, to compare with an unsharded run, and ops with `lower`.

Processes are forked from a server that has imported TorchRec once, and nothing else: no threads of the
caller, no locks.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

import itertools

from shapes import column, replica, row

from shardcore.core.links import host_names
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.io.writing import write_atomic
from shardcore.step.kinds import (
    SHARDING_KINDS,
    even_row_ranges,
    kind_of_torchrec_type,
    pod_size,
    possible_groups,
    shards_by_device,
)
from shardcore.step.lower import lower
from shardcore.step.ways import consolidate_placements
from shardcore.torchrec.modules import tables_of_model
from shardcore.torchrec.plan_files import plan_from_json, plan_to_json
from shardcore.torchrec.sharding_plan import from_torchrec, to_torchrec
from shardcore.torchrec.topologies import POD_SIZE

PRELOADED = ["training", "torchrec.distributed", "torchrec.models.dlrm", "fbgemm_gpu"]
LEARNING_RATE, BATCH, STEPS = 0.5, 4, 3
LEFT = {"a": (24, 16, ["f0"]), "b": (50, 8, ["f1", "f2"]), "c": (40, 32, ["f0"]), "d": (10, 8, ["f3"])}
RIGHT = {"c": (17, 12, ["f4"]), "e": (33, 20, ["f2"])}
"""Two collections with a table's name in common: c. Table b has two features; f0 and f2 have two tables."""


class Model(nn.Module):
    def __init__(self, device: str = "meta", sequence: bool = False) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

        def bags(tables: dict) -> nn.Module:
            return EmbeddingBagCollection(
                device=torch.device(device),
                tables=[
                    EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=f)
                    for n, (r, d, f) in tables.items()
                ],
            )

        super().__init__()
        self.left = bags(LEFT)
        self.inner = nn.ModuleDict({"right": bags(RIGHT)})
        self.sequence = (
            EmbeddingCollection(
                device=torch.device(device),
                tables=[
                    EmbeddingConfig(name="s", num_embeddings=30, embedding_dim=8, feature_names=["f5"]),
                    EmbeddingConfig(name="t", num_embeddings=21, embedding_dim=8, feature_names=["f6"]),
                ],
            )
            if sequence
            else None
        )

    def forward(self, features):
        pooled = [
            x for ebc in (self.left, self.inner["right"]) for _, x in sorted(ebc(features).to_dict().items())
        ]
        rows = [self.sequence(features)[f].values() for f in ("f5", "f6")] if self.sequence else []
        return torch.cat(pooled, 1), rows


def problem(
    n_hosts: int = 2, per_host: int = 2, sequence: bool = False, ordered: bool = False, pods: int = 1
) -> Problem:
    shapes = {
        "a": LEFT["a"],
        "b": LEFT["b"],
        "left.c": LEFT["c"],
        "d": LEFT["d"],
        "inner.right.c": RIGHT["c"],
        "e": RIGHT["e"],
    }
    tables = [
        Table(
            n,
            r,
            d,
            2.0 * len(f),
            ordered=ordered,
            collection="inner.right" if n in ("inner.right.c", "e") else "left",
        )
        for n, (r, d, f) in shapes.items()
    ]
    if sequence:
        tables += [Table(name, rows, 8, 2.0, collection="sequence") for name, rows in (("s", 30), ("t", 21))]
    devices = tuple(Device(10**9, host=host) for host in host_names(n_hosts * per_host, n_hosts, pods))
    return Problem("model", tuple(tables), Topology(devices), BATCH * len(devices))


def draw(given: Problem, rng: np.random.Generator) -> Plan:
    """A plan of all kinds that TorchRec trains."""
    return Plan(tuple(p for t in given.tables for p in _draw(t, given.topology, rng)))


def _draw(t: Table, on: Topology, rng: np.random.Generator) -> list[Placement]:
    sequence, n = t.sequence or t.name in ("s", "t"), len(on)
    kinds = ["whole", "columns", "rows", "everywhere", "host", "grid"]
    kind = rng.choice(kinds[: 3 if sequence else 6])  # TorchRec's dense kernel does not run sequences on CPU
    if kind == "columns":
        if sequence:
            order, width = rng.permutation(n), t.dim // 2 if t.dim % 8 == 0 else t.dim
            return [
                column(t, int(order[i % n]), lo, lo + width) for i, lo in enumerate(range(0, t.dim, width))
            ]
        return [column(t, int(rng.integers(n)), lo, hi) for lo, hi in _columns(t, rng)]
    if kind == "everywhere" and n > 1:
        return [replica(t, on)]
    if kind == "rows" and n > 1 and even_row_ranges(t.rows, n):
        return [row(t, on)]
    for by_domain in (x for x in SHARDING_KINDS.values() if x.rows_over and kind in ("host", "grid")):
        if groups := possible_groups(by_domain, t.rows, on, None):
            return [
                Placement(by_domain.name, Shard(t, 0, t.rows, *c), groups[rng.integers(len(groups))])
                for c in (_columns(t, rng) if kind == "grid" else [(0, t.dim)])
            ]
    return [column(t, int(rng.integers(n)))]


def _columns(t: Table, rng: np.random.Generator) -> list[tuple[int, int]]:
    n = min(int(rng.integers(2, 5)), t.dim // 4)
    cuts = [0, *sorted(rng.choice(np.arange(4, t.dim, 4), n - 1, replace=False).tolist()), t.dim]
    return list(itertools.pairwise(cuts))


# --- there and back -----------------------------------------------------------------------------------------


def held(plan: Plan, n_devices: int) -> list[dict[str, tuple[str, int]]]:
    """Meaning of a plan for each device: per table its kind and cells, whichever they are."""
    found = [{} for _ in range(n_devices)]
    for p in plan.placements:
        for d, shard in shards_by_device(p):
            _, cells = found[d].get(shard.table.name, ("", 0))
            found[d][shard.table.name] = (p.kind, cells + shard.rows * shard.width)
    return found


def lost(plan: Plan, given: Problem, module: nn.Module, rng: np.random.Generator) -> str:
    """Parts of a plan that are lost on its way to TorchRec and its file, with random settings of its tables,
    and back; "" is nothing."""
    theirs = to_torchrec(plan, given, module)
    for of_module in theirs.plan.values():
        for name, sharding in of_module.items():
            if sharding.sharding_type != "data_parallel":
                of_module[name] = replace(sharding, **_settings(rng))
    ours = from_torchrec(theirs, given, module)
    n = len(given.topology)
    checks = {
        "what a device holds": held(ours, n) == held(plan, n),
        "the file": plan_from_json(plan_to_json(theirs)) == theirs,
        "consolidation": ours.placements == consolidate_placements(ours.placements),
        "TorchRec's plan": to_torchrec(ours, given, module) == theirs,
        "our plan": from_torchrec(to_torchrec(ours, given, module), given, module) == ours,
    }
    return ", ".join(name for name, same in checks.items() if not same)


def _settings(rng: np.random.Generator) -> dict[str, Any]:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
    from torchrec.distributed.types import CacheParams, DataType

    kernel = str(rng.choice(["fused", "fused_uvm", "fused_uvm_caching"]))
    cache = CacheParams(CacheAlgorithm.LRU, float(rng.random()), precision=DataType.FP16)
    return {
        "compute_kernel": kernel,
        "cache_params": cache if kernel == "fused_uvm_caching" else None,
        "stochastic_rounding": [None, True, False][rng.integers(3)],
        "bounds_check_mode": [None, BoundsCheckMode.NONE][rng.integers(2)],
        "output_dtype": [None, DataType.BF16][rng.integers(2)],
    }


# --- training -----------------------------------------------------------------------------------------------


def train(
    given: Problem, plans: Mapping[int, Plan], sequence: bool = False, limit_s: float = 120
) -> dict[int, str]:
    """Differences and failures of each plan that was trained, in words; "" if there are none.

    A plan's number is its seed. Training ends with the first that fails, or for which a process dies.
    """
    return train_each({i: (given, plan, sequence) for i, plan in plans.items()}, limit_s)


def train_each(plans: Mapping[int, tuple[Problem, Plan, bool]], limit_s: float = 120) -> dict[int, str]:
    """The same of plans of several topologies, of as many ranks. With each its problem, and if it has sequences."""
    n = len(next(iter(plans.values()))[0].topology)
    with tempfile.TemporaryDirectory() as folder:
        codes = in_processes(n, _work, (plans, folder), limit_s)
        said: dict[int, list[str]] = {}
        for path in sorted(Path(folder).glob("said-*")):
            said.setdefault(int(path.name.split("-")[1]), []).append(path.read_text())
    result = {i: "; ".join(filter(None, words)) for i, words in said.items() if any(words) or len(words) == n}
    died = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    if died and not any(result.values()) and (missing := [i for i in plans if i not in result]):
        result[missing[0]] = "; ".join(died)
    return result


def in_processes(n: int, work: Callable[..., None], args: Sequence[Any], limit_s: float) -> list[int]:
    """Run work(rank, *args) in n processes; their exit codes. Those that take longer than the limit,
    together, are killed."""
    context = mp.get_context("forkserver")
    # A server that measured before has no TorchRec, which each process would import.
    if forkserver._forkserver._preload_modules != PRELOADED:
        forkserver._forkserver._stop()
    context.set_forkserver_preload(PRELOADED)
    workers = [context.Process(target=work, args=(rank, *args)) for rank in range(n)]
    end = time.monotonic() + limit_s
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
    return [worker.exitcode for worker in workers]


def on_ranks(given: Problem, work: Callable[..., Any], *args: Any, limit_s: float = 120) -> list[Any]:
    """Run work(rank, given, folder, *args) on a gloo rank for each of the problem's devices.

    Returns each rank's result as JSON: a text with the error if it raised one, None if it died or hung.
    """
    n = len(given.topology)
    with tempfile.TemporaryDirectory() as folder:
        in_processes(n, _report, (given, folder, work, args), limit_s)
        paths = [Path(folder, f"result-{rank}") for rank in range(n)]
        return [json.loads(p.read_text()) if p.exists() else None for p in paths]


def _report(rank: int, given: Problem, folder: str, work: Callable[..., Any], args: Sequence[Any]) -> None:
    start_rank(rank, given.topology, folder)
    try:
        result = work(rank, given, folder, *args)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    write_atomic(Path(folder, f"result-{rank}"), json.dumps(result).encode())
    os._exit(0)  # the others may be gone


def start_rank(rank: int, topology: Topology, folder: str) -> None:
    """Make this process a rank of a gloo job. The environment tells it its host, as torchrun would."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    set_host(rank, topology)
    torch.set_num_threads(1)
    n = len(topology)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n)


def set_host(rank: int, topology: Topology) -> None:
    """Tell a rank its host and pod. TorchRec forgets its groups of another topology."""
    from torchrec.distributed import comm

    comm._INTRA_PG = comm._CROSS_PG = None
    n, device = len(topology), topology.ranks[rank]
    on_host = next(devices for devices in topology.devices_by_host if device in devices)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(n),
        LOCAL_WORLD_SIZE=str(len(on_host)),
        LOCAL_RANK=str(on_host.index(device)),
    )
    os.environ.pop(POD_SIZE, None)
    if (hosts_of_pod := pod_size(topology)) > 1:
        os.environ[POD_SIZE] = str(hosts_of_pod)


def run_script(n: int, path: Path, *args: str, limit_s: float = 120) -> tuple[list[int], str]:
    """A script in n processes as torchrun starts them, less torchrun itself; exit codes, and what they
    printed."""
    store = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False
    )  # its port is open, so nobody takes it
    with tempfile.TemporaryDirectory() as folder:
        codes = in_processes(n, _script, (n, store.port, path, args, folder), limit_s)
        return codes, "".join(p.read_text() for p in sorted(Path(folder).iterdir()))


def _script(rank: int, n: int, port: int, path: Path, args: Sequence[str], folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(n),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(n),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    sys.argv[:] = [str(path), *args]
    sys.stdout = sys.stderr = open(f"{folder}/{rank}", "w", buffering=1)
    runpy.run_path(str(path), run_name="__main__")


def _work(rank: int, plans: Mapping[int, tuple[Problem, Plan, bool]], folder: str) -> None:
    start_rank(rank, next(iter(plans.values()))[0].topology, folder)
    for i, (given, plan, sequence) in plans.items():
        set_host(rank, given.topology)
        try:
            worst = _differs(rank, given, plan, sequence, seed=i)
        except Exception as error:  # whatever TorchRec raises; the other ranks then lose this one
            worst = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        Path(f"{folder}/said-{i}-{rank}").write_text(f"rank {rank}: {worst}" if worst else "")
        if worst:
            break
    os._exit(0)  # the others may be gone


def kinds_of(plan: Plan, given: Problem, sequence: bool = False) -> dict[str, str]:
    """The sharding type of each table, by path."""
    exported = to_torchrec(plan, given, Model(sequence=sequence), "cpu")
    return {
        f"{path}.{name}": f"{s.sharding_type} {s.ranks}"
        for path, m in exported.plan.items()
        for name, s in m.items()
    }


def sharded(model: nn.Module, plan: Any, optimizer: str, rate: float, codecs: Any = None) -> Any:
    """The model as a DistributedModelParallel on CPU. optimizer: FBGEMM's name of that of fused ops."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    settings = {
        "fused_params": {"optimizer": EmbOptimType[optimizer], "learning_rate": rate},
        "qcomm_codecs_registry": codecs,
    }
    sharders = [EmbeddingBagCollectionSharder(**settings), EmbeddingCollectionSharder(**settings)]
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def _differs(rank: int, given: Problem, plan: Plan, sequence: bool, seed: int) -> str:
    n = len(given.topology)
    torch.manual_seed(seed)
    whole = Model("cpu", sequence)
    exported = to_torchrec(plan, given, whole, "cpu")
    model = sharded(Model("cpu", sequence), exported, "EXACT_SGD", LEARNING_RATE)
    if wrong := _other_ops(model.module, exported, given, rank):
        return wrong
    for mine, theirs in _pairs(model, whole):
        mine.copy_(theirs)
    everywhere = [
        f"{path}.{'embeddings' if path == 'sequence' else 'embedding_bags'}.{name}."
        for path, module in exported.plan.items()
        for name, s in module.items()
        if s.sharding_type == "data_parallel"
    ]
    dense = [
        p
        for name, p in model.named_parameters()
        if name.removeprefix("module.").startswith(tuple(everywhere))
    ]
    optimizers = [torch.optim.SGD(p, lr=LEARNING_RATE) for p in (dense, list(whole.parameters())) if p]
    for step in range(STEPS):
        batches = [_batch(seed * 1000 + step * 10 + r) for r in range(n)]
        (pooled, rows), reference = model(batches[rank]), [whole(b) for b in batches]
        apart = max(
            (x - y).abs().max().item()
            for x, y in zip([pooled, *rows], [reference[rank][0], *reference[rank][1]], strict=True)
            if x.numel()
        )
        if apart > 1e-5:
            return f"step {step}, outputs differ by {apart:.1e}"
        for optimizer in optimizers:
            optimizer.zero_grad()
        _loss(pooled, rows).backward()
        torch.stack([_loss(*r) for r in reference]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    apart = max(
        ((mine - theirs).abs().max().item() for mine, theirs in _pairs(model, whole) if mine.numel()),
        default=0.0,  # a rank without shards
    )
    return f"parameters differ by {apart:.1e}" if apart > 1e-5 else _missing(model, whole)


def _missing(model, whole) -> str:
    """Rows of tables that no rank has."""
    mine = [(name, at) for name, _, at in _shards(model)]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    for name, value in whole.state_dict().items():
        seen = torch.zeros(value.shape, dtype=torch.bool)
        for of_name, at in itertools.chain(*of_ranks):
            if of_name == name:
                seen[at] = True
        if not seen.all():
            return f"no rank has {int((~seen).any(1).sum())} rows of {name}"
    return ""


def _other_ops(model, exported, given: Problem, rank: int) -> str:
    """Shards that a rank's fused ops hold otherwise than `lower` has it, by collection; sequences aside."""
    plan = from_torchrec(exported, given, model_like(exported))
    names = tables_of_model(model_like(exported))
    for path, shardings in exported.plan.items():
        if path == "sequence":  # what is cut there stays apart from what is whole
            continue
        module = model.get_submodule(path)
        wanted = {
            op.kind: sorted((names[s.table.name].name, s.rows, s.width) for s in op.shards)
            for op in lower(plan, given).ops[given.topology.ranks[rank]]
            if op.sharding_kind.collection == path
        }
        found: dict[str, list] = {}
        for lookup in module._lookups:
            for op in getattr(lookup, "module", lookup)._emb_modules:
                held = sorted((t.name, t.local_rows, t.local_cols) for t in op._config.embedding_tables)
                kind = kind_of_torchrec_type(shardings[held[0][0]].sharding_type, given.topology).name
                if kind in found:
                    return f"two ops for {kind} shards of {path!r}"
                found[kind] = held
        if found != wanted:
            return f"ops of {path!r} are {found}; lower has {wanted}"
    return ""


def model_like(exported) -> Model:
    return Model(sequence="sequence" in exported.plan)


def _loss(pooled, rows):
    return ((pooled - 1) ** 2).sum(1).mean() + sum(((r - 1) ** 2).sum() / BATCH for r in rows)


def _pairs(model, whole):
    """This rank's shards of the sharded model, each beside its part of the whole one."""
    reference = whole.state_dict()
    for name, tensor, at in _shards(model):
        yield tensor, reference[name][at]


def _shards(model):
    """This rank's shards: name, weights, and the rows and columns that they are."""
    for name, value in model.state_dict().items():
        for tensor, offsets, sizes in (
            [(s.tensor, s.metadata.shard_offsets, s.metadata.shard_sizes) for s in value.local_shards()]
            if hasattr(value, "local_shards")
            else [(value, (0, 0), value.shape)]
        ):
            yield name, tensor.detach(), tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def _batch(seed: int):
    from torchrec import KeyedJaggedTensor

    rng = np.random.default_rng(seed)
    keys, rows = [f"f{i}" for i in range(7)], [24, 50, 33, 10, 17, 30, 21]
    lengths = rng.integers(0, 4, (len(keys), BATCH))
    values = np.concatenate([rng.integers(0, r, n) for r, n in zip(rows, lengths.sum(1), strict=True)])
    return KeyedJaggedTensor(
        keys=keys, values=torch.from_numpy(values), lengths=torch.from_numpy(lengths.ravel())
    )
