"""ShardCoreProfiler: a callback that leaves traces and lookups of a running job in a folder.

    profiler = ShardCoreProfiler(model, "job/", every=1000)
    for _ in range(steps):
        pipeline.progress(batches)
        profiler.step()

`shardcore job read job/` then says what a step spends and why. Ranks exchange nothing for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcore.core.job import Job
from shardcore.core.validation import require, require_type
from shardcore.io import job_folder
from shardcore.io.measurements import TimingSpread
from shardcore.torchrec.modules import collections_of_model, tables_of_model
from shardcore.torchrec.problems import problem_for
from shardcore.torchrec.sharding_plan import from_torchrec, plan_in_use
from shardcore.torchrec.topologies import topology_of_job

if TYPE_CHECKING:
    from torch import nn

FIRST = 20
"""The first step that is traced, unless `every` is less: steps before it warm up."""
_MOST_TIMES = 1000
_LOG = logging.getLogger(__name__)


class ShardCoreProfiler:
    """Trace a step of a job now and then, on each rank.

    model: the job's DistributedModelParallel.
    folder: folder that all ranks write to; files of several jobs must not mix there.
    every: steps from one traced step to the next.
    steps: steps that are traced, one after another.
    keep: traced steps whose files stay, and one that is being written. Older ones are removed.
    job: properties of a step around the embeddings. None: the default, TorchRec's TrainPipelineSparseDist.

    What fails while it writes is logged and stops no training.
    Raises ShardCoreError for a model without sharded collections.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path = "shardcore-job",
        *,
        every: int = 1000,
        steps: int = 1,
        keep: int = 5,
        job: Job | None = None,
    ) -> None:
        import torch

        from shardcore.torchrec.moves.agreement import rank_and_world_size

        for name, value in (("every", every), ("steps", steps), ("keep", keep)):
            require_type(value, int, name, "a whole number")
            require(value >= 1, f"{name} is {value}; it needs 1 or more")
        require(every > steps + 1, f"every is {every}; it needs more than steps + 1, {steps + 1}")
        self._collections = [c for c in collections_of_model(model, refuses_others=False) if c.is_sharded]
        require(
            bool(self._collections),
            f"model is a {type(model).__name__} without sharded collections; it needs to be a "
            "DistributedModelParallel",
        )
        self._model, self._job = model, job or Job()
        self._folder, self._every, self._steps, self._keep = Path(folder), every, steps, keep
        # A job on one rank may have no process group.
        self._rank, self._world_size = rank_and_world_size()
        # The position within a cycle: 0 warms the profiler up, then `steps` are traced.
        self._count, self._first = 0, min(FIRST, every) - 1
        self._times_ms: list[float] = []
        self._began_s: float | None = None
        self._lookups: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._local_batch = 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        # GPU activities only where there is a GPU.
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile: Any = None
        self._start: Callable[[], Any] = lambda: torch.profiler.profile(
            activities=activities,
            record_shapes=True,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._write_trace,
        )

    def step(self) -> None:
        """Count a training step, and start, advance or stop the trace. Call it after each step."""
        # Steps since the first traced one, in cycles of `every`.
        now_s, position = time.perf_counter(), (self._count - self._first) % self._every
        if self._profile is None and self._began_s is not None:
            # Steps that are traced take longer, so only others are timed.
            # A ring: the newest times count.
            self._times_ms.append(1e3 * (now_s - self._began_s))
            del self._times_ms[:-_MOST_TIMES]
        if self._profile is not None:
            self._profile.step()
            if position > self._steps:
                self._profile.stop()
                self._profile = None
        # Begin one step ahead: the first profiled step warms up.
        elif position == 0 and self._count >= self._first:
            self._capture_next_batch()
            self._profile = self._start()
            self._profile.start()
        self._count += 1
        # What writing takes is no step's time.
        self._began_s = time.perf_counter() if position != 0 and self._profile is None else None

    # --- lookups --------------------------------------------------------------------------------------------

    def _capture_next_batch(self) -> None:
        """Wrap each collection's input_dist once, to record the ids of the next batch."""
        self._lookups = {}
        for collection in self._collections:
            module, original = collection.module, collection.module.input_dist

            def input_dist(
                *args: Any, _module: Any = module, _original: Callable = original, **named: Any
            ) -> Any:
                # The class has it again. A module that no batch entered for a cycle is wrapped twice.
                vars(_module).pop("input_dist", None)
                for x in (*args, *named.values()):
                    if hasattr(x, "stride_per_key") and hasattr(x, "to_dict"):
                        self._keep_lookups(x)
                        break
                return _original(*args, **named)

            module.input_dist = input_dist

    def _keep_lookups(self, features: Any) -> None:
        """Keep ids and lengths of a KeyedJaggedTensor on the CPU, by feature."""
        self._local_batch = max(features.stride_per_key(), default=0)
        self._lookups |= {
            name: (one.values().cpu().numpy().copy(), one.lengths().cpu().numpy().copy())
            for name, one in features.to_dict().items()
        }

    # --- files ----------------------------------------------------------------------------------------------

    def _write_trace(self, profile: Any) -> None:
        """Write trace, lookups and facts of the traced step to the job's folder. Failures are only logged."""
        try:
            folder = job_folder.step_folder(self._folder, self._count)
            folder.mkdir(parents=True, exist_ok=True)
            job_folder.write_rank_measurements(folder, self._rank, self._step_ms_spread(), self._lookups)
            if self._rank == 0:
                self._write_job_facts(folder)
            path = job_folder.trace_path(folder, self._rank)
            # A temporary name, so that a reader never finds half a trace.
            temporary = path.with_name(f".{os.getpid()}.{path.name}")
            profile.export_chrome_trace(str(temporary))
            os.replace(temporary, path)
            # One rank removes old steps for all.
            if self._rank == 0:
                self._remove_old_steps()
        except Exception as error:  # of any library: a trace is worth no job
            _LOG.warning("ShardCoreProfiler wrote no trace at step %d: %s", self._count, error)

    def _step_ms_spread(self) -> TimingSpread | None:
        """Quartiles of the steps timed without tracing, in ms; None if there were none."""
        if not self._times_ms:
            return None
        low, middle, high = np.quantile(self._times_ms, (0.25, 0.5, 0.75)).tolist()
        return TimingSpread(middle, low, high, len(self._times_ms))

    def _write_job_facts(self, folder: Path) -> None:
        """Write the model's problem, its current plan and package versions to a traced step's folder."""
        pooling: dict[str | tuple[str, str], float] = {
            f: len(ids) / max(1, len(lengths)) for f, (ids, lengths) in self._lookups.items()
        }
        topology, batch = topology_of_job(self._world_size), self._local_batch * self._world_size
        problem = problem_for(self._model, topology, batch, pooling, name="job", job=self._job)
        plan = from_torchrec(plan_in_use(self._model), problem, self._model)
        features = {key: tuple(t.config.feature_names) for key, t in tables_of_model(self._model).items()}
        facts = job_folder.JobFacts(self._world_size, features, _package_versions())
        job_folder.write_facts(folder, facts, problem, plan)

    def _remove_old_steps(self) -> None:
        import shutil

        for old in job_folder.complete_step_folders(self._folder)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)


def _package_versions() -> Mapping[str, str]:
    versions = {}
    for package in ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
