"""Kill ranks and hosts of training jobs under torchrun's agents: does training go on, bit-equal, and how soon?

    sudo python tests/torchrec/lost_ranks.py --kills 200 --out rows.jsonl    # goes on with what rows.jsonl has

A job trains a small DLRM on eight gloo ranks, each with an agent of its own, or on four emulated hosts with an agent
and two ranks each. Agents and workers get SIGKILL at a moment of a worker's step. `rank` and `host` do not come back.
`cut` is a host whose link goes down first, so that others hear nothing. A `worker` is started again by its agent.
Moments of a restart (agents rendezvous, workers start) are reached by killing another worker before.

Then the job has to train on from its last whole checkpoint. A clean job of as many ranks begins from a copy of it, and
has to have the same weights and optimizer state, bit by bit, on each rank. Agents are forked from this process, which
has imported torch and all else. With --torchrun they are the command, and import all anew. The store of the rendezvous
is a process of its own, on a host that is not killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from bench.common import bench_parser, print_progress, read_rows
from bench.hosts import Box, emulated_hosts
from shardcore.core.errors import ShardCoreError
from shardcore.measure.hosts import INTERFACE, EmulatedHost
from shardcore.plans.survive import prepare_plans, write_prepared_plan
from shardcore.report.text import text_table
from shardcore.torchrec.moves.checkpoints import load_rows, save_rows
from shardcore.torchrec.planner import ShardCorePlanner

TABLES = {f"t{i}": 37 + 450 * i for i in range(12)}
"""Rows of each table, whose feature has its name."""
DIM, DENSE, BATCH, EVERY = 16, 13, 32, 10
"""Columns of a table, dense features, samples of a rank, and steps from checkpoint to checkpoint."""
OURS, THEIRS = "ShardCore", "TorchRec"
SHARDERS: list[Any] = [
    EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05})
]
RANKS, LEAST, CHECKED, FOR_EVER_S = 8, 4, 2 * EVERY, 120.0
"""Most and fewest ranks of a job, steps that have to be equal, and seconds after which a wait is one without end."""
RUNNING, RESTARTING = ("forward", "backward", "update", "save"), ("rendezvous", "start", "plan", "load")
HOWS = {1: ["rank", "rank", "worker"], 2: ["host", "cut", "worker"]}
"""What is killed in a job, by its ranks of an agent."""
RENDEZVOUS = "is_host=0,last_call_timeout=5,keep_alive_interval=5"
ARMS = [
    (OURS, 1, True),
    (OURS, 2, True),
    (OURS, 1, False),
    (THEIRS, 1, False),
    (OURS, 1, True),
    (OURS, 2, False),
    (OURS, 1, False),
    (THEIRS, 2, False),
]
"""Arm, ranks of an agent, and whether plans for the losses are prepared, of jobs in turn."""
UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_FORK = multiprocessing.get_context("fork")


# --- the job -----------------------------------------------------------------------------------------------


def untrained_model() -> DLRMTrain:
    bags = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in TABLES.items()
        ],
    )
    return DLRMTrain(DLRM(bags, DENSE, [32, DIM], [32, 1], torch.device("cpu")))


def planner_for(arm: str, ranks: int, per_host: int, prepared: Path | None = None) -> Any:
    topology = Topology(ranks, "cpu", local_world_size=per_host)
    # On a CPU, TorchRec's planner takes FBGEMM's fused kernels if it has to, and cuts no rows for them.
    kinds = {
        name: ["row_wise"] if name in ("t10", "t11") else ["table_wise", "column_wise"] for name in TABLES
    }
    constraints = {
        name: ParameterConstraints(
            compute_kernels=["fused"],
            pooling_factors=[3.0],
            sharding_types=None if arm == THEIRS else kinds[name],
        )
        for name in TABLES
    }
    if arm == THEIRS:
        return EmbeddingShardingPlanner(topology, BATCH, constraints=constraints)
    return ShardCorePlanner(
        topology,
        BATCH,
        constraints,
        model="cpu",
        prepared=prepared if prepared and prepared.is_dir() else None,
    )


def batch(step: int, rank: int, ranks: int) -> Batch:
    """Samples of a rank in a step."""
    drawn = torch.Generator().manual_seed(step * 4096 + rank * 64 + ranks)
    lengths = torch.randint(1, 6, (len(TABLES) * BATCH,), generator=drawn)
    # Few ids, so that ranks share rows; the smallest table has 37.
    values = torch.randint(0, 37, (int(lengths.sum()),), generator=drawn)
    return Batch(
        torch.rand(BATCH, DENSE, generator=drawn),
        KeyedJaggedTensor(list(TABLES), values, lengths=lengths),
        torch.randint(0, 2, (BATCH,), generator=drawn),
    )


def job_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """What a TorchRec job gives to DCP."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def digest(model: Any, optimizer: Any) -> str:
    """SHA-256 of all weights and optimizer state of this rank: its shards, and what is whole."""
    values = flatten_state_dict(job_state(model, optimizer))[0].values()
    shards = [s for of in values for s in (of.local_shards() if hasattr(of, "local_shards") else [of])]
    own = [tensor for s in shards if isinstance(tensor := getattr(s, "tensor", s), torch.Tensor)]
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in own)).hexdigest()


def save(arm: str, folder: Path, model: Any, optimizer: Any, dense: Any) -> None:
    if arm == THEIRS:
        save_by_dcp(job_state(model, optimizer), checkpoint_id=folder)
        return
    # The dense part first: where the .metadata of the rows is, all is there.
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save((dense.param_groups[0]["params"], dense.state_dict()), folder / "dense.pt")
    save_rows(model, folder, optimizer)


def load(arm: str, folder: Path, model: Any, optimizer: Any, dense: Any) -> str:
    """Load a checkpoint. Returns why state could not be loaded exactly, "" if it could.

    Row-wise state has a number a row of each part of columns, so other parts need other numbers.
    """
    if arm == THEIRS:
        state = job_state(model, optimizer)
        load_by_dcp(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return ""
    refusal = ""
    try:
        load_rows(model, folder, optimizer)
    except ShardCoreError as error:  # on all ranks
        refusal = str(error)
        load_rows(model, folder, optimizer, approximate=True)
    weights, state = torch.load(folder / "dense.pt")
    for own, saved in zip(dense.param_groups[0]["params"], weights, strict=True):
        own.data.copy_(saved)
    dense.load_state_dict(state)
    return refusal


def train(folder: str, name: str, arm: str, per_host: str, steps: str, prepared: str = "") -> None:
    """Train this rank's part of a job until its last step.

    per_host: ranks of a host. prepared: folder of prepared plans by number of ranks, "" for none.
    """
    # A worker that an agent forked has the agent's handler, which a wait in gloo does not reach.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    root = Path(folder)
    # A clean job has one agent for all of them.
    os.environ["LOCAL_WORLD_SIZE"] = per_host
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    out = os.open(root / f"{name}-{os.environ['LOCAL_RANK']}.marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def mark(moment: str, found: Any = None) -> None:
        os.write(out, (json.dumps([time.time(), rank, ranks, moment, found]) + "\n").encode())

    mark("start", os.getpid())
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mark("plan")
    torch.manual_seed(1)
    planner = planner_for(arm, ranks, int(per_host), Path(prepared, str(ranks)))
    model: Any = untrained_model()
    plan = planner.collective_plan(model, SHARDERS, dist.group.WORLD)
    mark("build")
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=SHARDERS)
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = torch.optim.Adagrad(parameters.values(), lr=0.05)
    optimizer = CombinedOptimizer([model.fused_optimizer, KeyedOptimizerWrapper(parameters, lambda _: dense)])
    mark("load")
    # Rank 0 says which, as ranks may see the files at different times.
    chosen = [max((int(path.parent.name) for path in root.glob("*/.metadata")), default=0)]
    dist.broadcast_object_list(chosen)
    step = chosen[0]
    refusal = load(arm, root / str(step), model, optimizer, dense) if step else ""
    # Rank 0 has planned for all.
    mark("loaded", [step, refusal, "prepared" in getattr(getattr(planner, "our_plan", 0), "provenance", {})])
    while step < int(steps):
        mark("forward")
        optimizer.zero_grad()
        loss, _ = model(batch(step, rank, ranks))
        mark("backward")
        loss.backward()
        mark("update")
        optimizer.step()
        step += 1
        mark("done", step)
        if step % EVERY == 0:
            mark("digest", [step, digest(model, optimizer)])
            mark("save")
            save(arm, root / str(step), model, optimizer, dense)
    dist.barrier()


# --- kills -------------------------------------------------------------------------------------------------


@dataclass
class RunningJob:
    """A job of an arm, its agents by number, and what its workers did.

    per_host: ranks of an agent. plans: folder of those prepared, or "". places: host of each agent.
    marks: by worker, each (time, rank, ranks, moment, found).
    """

    folder: Path
    arm: str
    per_host: int
    plans: str
    places: list[EmulatedHost | None]
    agents: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    read: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def read_marks(self) -> dict[str, list[Any]]:
        for path in self.folder.glob("*.marks"):
            with path.open("rb") as file:
                file.seek(self.read[path.stem])
                lines = [line for line in file if line.endswith(b"\n")]
            self.read[path.stem] += sum(map(len, lines))
            self.marks[path.stem] += map(json.loads, lines)
        return self.marks

    def workers(self) -> list[str]:
        """Workers of agents that were not killed."""
        return [f"{name}-{i}" for name in self.agents for i in range(self.per_host)]

    def wait_for(self, found: Callable[[], Any]) -> Any:
        """What `found` returns once it is true. Raises TimeoutError."""
        end = time.time() + FOR_EVER_S
        while time.time() < end and any(agent.is_alive() for agent in self.agents.values()):
            self.read_marks()
            if result := found():
                return result
            time.sleep(0.005)
        raise TimeoutError(f"{sum(a.is_alive() for a in self.agents.values())} agents are left")

    def found_on_all(self, moment: str, since: float, step: int | None = None) -> list[Any] | None:
        """A mark of each worker that is left, of a job of as many; None if one has none yet."""
        workers = self.workers()
        wanted = [len(workers), moment]
        found = [
            next(
                (
                    m
                    for m in self.marks[worker]
                    if m[0] > since and m[2:4] == wanted and (step is None or m[4][0] == step)
                ),
                None,
            )
            for worker in workers
        ]
        return found if all(found) else None

    def kill(self, worker: str, how: str) -> dict[str, Any]:
        """Kill a worker, or its agent with all of its workers. Returns what the worker was doing."""
        name = worker.rpartition("-")[0]
        if how == "cut" and (place := self.places[int(name)]):
            command = ["nsenter", f"--net={place.namespace}", "ip", "link", "set", INTERFACE, "down"]
            subprocess.run(command, check=True)
        own = [m[4] for m in self.read_marks()[worker] if m[3] == "start"][-1:]
        at, agent = time.time(), psutil.Process(self.agents[name].pid)
        running = agent.children(recursive=True)
        worker_only = [process for process in running if process.pid in own]
        if how != "worker":
            del self.agents[name]
        for process in worker_only if how == "worker" else [agent, *running]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)
        moment = self.read_marks()[worker][-1][3] if worker_only else "rendezvous"
        return {"how": how, "worker": worker, "moment": moment, "at": at}


def _run_store(place: EmulatedHost | None, address: str, port: int) -> None:
    if place:
        place.move_process()
    _store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    signal.pause()


def _run_agent(place: EmulatedHost | None, words: str, arguments: list[str], torchrun: bool) -> None:
    """Run a host's agent with torchrun's options. arguments: of the training, whose first two name the agent."""
    out = os.open(f"{arguments[0]}/{arguments[1]}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if place:
        place.move_process()
    command = [*words.split(), __file__, *arguments]
    if torchrun:
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command])
    elastic_launch(config_from_args(parse_args(command))[0], train)(*arguments)


@contextlib.contextmanager
def started_job(arm: str, per_host: int, plans: str, args: Any) -> Iterator[RunningJob]:
    """A job that runs while the context lasts."""
    n, port = RANKS // per_host, get_free_port()
    # The last host is the cluster's head, with the store.
    hosts = emulated_hosts(Box(n + 1, 1, between_gbit_s=1.0)) if per_host > 1 else None
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, hosts or contextlib.nullcontext() as places:
        running = RunningJob(Path(folder), arm, per_host, plans, places or [None] * (n + 1))
        addresses = [place.address if place else "127.0.0.1" for place in running.places]
        store = _FORK.Process(target=_run_store, args=(running.places[n], addresses[n], port))
        store.start()
        for i, place in enumerate(running.places[:n]):
            words = f"""--nnodes {LEAST // per_host}:{n} --nproc-per-node {per_host} --max-restarts 99
                --rdzv-backend c10d --rdzv-endpoint {addresses[n]}:{port} --rdzv-id {Path(folder).name}
                --rdzv-conf {RENDEZVOUS} --local-addr {addresses[i]} --start-method fork"""
            arguments = [folder, str(i), arm, str(per_host), str(10**6), plans]
            agent = _FORK.Process(target=_run_agent, args=(place, words, arguments, args.torchrun))
            agent.start()
            running.agents[str(i)] = agent
        try:
            yield running
        finally:
            for name in [name for name, agent in running.agents.items() if agent.is_alive()]:
                running.kill(f"{name}-0", "end")
            store.kill()


def clean_digests(job: RunningJob, step: int) -> dict[int, str]:
    """Digests by rank of a job that begins from a copy of a checkpoint of another."""
    copy = job.folder / f"clean-{time.time()}"
    copy.mkdir()
    if step:
        shutil.copytree(job.folder / str(step), copy / str(step))
    words = f"""--master-port {get_free_port()} --nproc-per-node {len(job.workers())} --max-restarts 2
        --start-method fork"""
    arguments = [str(copy), "clean", job.arm, str(job.per_host), str(step + CHECKED), job.plans]
    agent = _FORK.Process(target=_run_agent, args=(None, words, arguments, False))
    agent.start()
    agent.join(FOR_EVER_S)
    marks = RunningJob(copy, job.arm, 1, "", []).read_marks().values()
    return {m[1]: m[4][1] for of in marks for m in of if m[3] == "digest" and m[4][0] == step + CHECKED}


def prepare_plans_by_size(folder: Path) -> None:
    """Write plans for the loss of a host, and of the next, to {folder}/{ranks of a host}/{ranks left}."""
    for per_host in (1, 2):
        planner = planner_for(OURS, RANKS, per_host)
        planner.plan(untrained_model(), SHARDERS)
        plan, problem, model = planner.our_plan, planner.problem, planner._cost_model_for(planner.problem)
        for ranks in range(RANKS - per_host, LEAST - 1, -per_host):
            (one,) = prepare_plans(plan, problem, model, "host")
            left = folder / str(per_host) / str(ranks)
            left.mkdir(parents=True)
            write_prepared_plan(left, one)
            plan, problem = one.plan, one.problem


def strike(running: RunningJob, how: str, moment: str, draw: random.Random) -> dict[str, Any]:
    """Kill a worker of a job or its agent at a moment, and see whether the job goes on."""
    kills: list[dict[str, Any]] = []
    row: dict[str, Any] = {
        "arm": running.arm,
        "how": how,
        "ranks": len(running.workers()),
        "kills": kills,
        "error": "",
    }
    victim, other = draw.sample(running.workers(), 2)
    try:
        running.wait_for(lambda: running.found_on_all("done", 0))
        marks = running.marks[victim]
        first = len(marks) if moment in RESTARTING else -1
        if moment in RESTARTING:
            kills.append(running.kill(other, "worker"))
        if moment == "rendezvous":
            # A few seconds pass before an agent starts its worker again.
            time.sleep(draw.uniform(0.3, 3))
        else:
            running.wait_for(lambda: any(m[3] == moment for m in marks[first:]))
        time.sleep(draw.uniform(0, 0.01))
        kills.append(running.kill(victim, how))
        since = at = kills[-1]["at"]
        for name in ("start", "build", "loaded", "done"):
            found = running.wait_for(lambda name=name, since=since: running.found_on_all(name, since))
            row[f"{name}_s"] = round(max(m[0] for m in found) - at, 2)
            if name == "loaded":
                since = min(m[0] for m in found)
                row["step"], row["refusal"], row["prepared"] = found[0][4]
        found = running.wait_for(lambda: running.found_on_all("digest", since, row["step"] + CHECKED))
        # A clean job that did not end, as on a busy machine, shows nothing.
        if clean := clean_digests(running, row["step"]):
            row["equal"] = {m[1]: m[4][1] for m in found} == clean
    except (TimeoutError, psutil.NoSuchProcess) as error:
        row["error"] = str(error)
    return row


def print_table(rows: list[dict[str, Any]], heads: list[str]) -> None:
    """Print by values of some columns how many losses a job survived, and how soon."""
    of = defaultdict(list)
    for row in rows:
        of[tuple(str(row.get(head, "")) for head in heads)].append(row)
    lines = []
    for group, found in sorted(of.items()):
        s = [row["done_s"] for row in found if not row["error"]]
        counts = (
            sum(len(row["kills"]) for row in found),
            len(found),
            len(s),
            sum(row.get("equal", False) for row in found),
            sum(bool(row.get("refusal")) for row in found),
            *([f"{median(s):.1f}", max(s)] if s else ["", ""]),
        )
        lines.append([*group, *map(str, counts)])
    heads = [*heads, "kills", "losses", "went on", "bit-equal", "state nearly", "s, median", "s, worst"]
    print(f"{text_table(heads, lines)}\n")


def main() -> None:
    parser = bench_parser(
        __doc__,
        kills=(200, "ranks, hosts and workers to kill"),
        folder=(Path(tempfile.gettempdir()), "for checkpoints"),
        torchrun=(False, "agents are the command"),
        arms=(list(range(len(ARMS))), "of ARMS, in turn"),
        out=...,
    )
    args = parser.parse_args()
    # By torchrun's default the ranks' store stays in the agent of the first rank 0: 0 shows what that brings.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
        UNSHARED: os.environ.get(UNSHARED, "1"),
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as lost:
        # In a process of its own: a process with threads of a search is not to be forked.
        preparing = _FORK.Process(target=prepare_plans_by_size, args=(Path(lost),))
        preparing.start()
        preparing.join()
        rows = read_rows(args.out)
        while sum(len(row["kills"]) for row in rows) < args.kills:
            number = max((row["job"] for row in rows), default=-1) + 1
            arm, per_host, has_plans = ARMS[args.arms[number % len(args.arms)]]
            plans, draw = f"{lost}/{per_host}" * has_plans, random.Random(number)
            with started_job(arm, per_host, plans, args) as running, args.out.open("a", buffering=1) as out:
                while len(running.workers()) > LEAST:
                    moment = [*RUNNING, *RESTARTING][len(rows) % 8]
                    # Between its workers, an agent has none to kill.
                    how = draw.choice(HOWS[per_host][: 2 + (moment != "rendezvous")])
                    rows.append({"job": number} | strike(running, how, moment, draw))
                    out.write(json.dumps(rows[-1]) + "\n")
                    print_progress(json.dumps(rows[-1]))
                    if rows[-1]["error"]:
                        shutil.copytree(running.folder, f"{args.out}.job{number}")
                        break
    for row in rows:
        row["moment"] = row["kills"][-1]["moment"] if row["kills"] else "launch"
        row["plan"] = "prepared" if row.get("prepared") else "searched"
    print_table(rows, ["arm", "moment"])
    print_table(rows, ["arm", "how", "plan"])


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(*sys.argv[1:])
    else:
        main()
