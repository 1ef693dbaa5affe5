"""All formats that ShardCore reads: who reads each, how it is damaged, and what is done with it.

A format that is not here fails tests/test_readers.py: every function of shardcore/, tasks/ and flows/ that
reads a file is a reader of a row. So nothing is read that bench.fuzz does not damage.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import fuzz_uses as uses
from bench.fuzz_damage import (
    damage_batch,
    damage_decision,
    damage_json,
    damage_model,
    damage_part,
    damage_rows,
    damage_tensors,
    damage_yaml,
    sealed,
)
from bench.fuzz_files import HAS_TORCHREC, Sound

Damage = Callable[[Path, random.Random], None]


@dataclass(frozen=True)
class Format:
    """A format of files.

    parts: those of the sound files that it is.
    damage, use: of a folder with its parts. use raises ShardCoreError for what is refused, and Nonsense for
        what was read and cannot be.
    readers: functions that read it, as FILE:FUNCTION.
    """

    parts: tuple[str, ...]
    damage: Damage
    use: Callable[[Path, Sound], None]
    readers: tuple[str, ...]


def _json(name: str, seal: Callable[[dict], dict] | None = None) -> Damage:
    return lambda folder, rng: damage_json(folder / name, rng, seal)


def _model(name: str) -> Damage:
    return lambda folder, rng: damage_model(folder, rng, name)


def _yaml(name: str) -> Damage:
    return lambda folder, rng: damage_yaml(folder / name, rng)


def _tensors(name: str) -> Damage:
    return lambda folder, rng: damage_tensors(folder / name, rng)


def _any(*damages: Damage) -> Damage:
    return lambda folder, rng: rng.choice(damages)(folder, rng)


FORMATS = {
    "problem": Format(
        ("problem.json",), _json("problem.json"), uses.use_problem, ("shardcore/io/files.py:read_problem",)
    ),
    "pool": Format(
        ("pool.json",),
        _json("pool.json", sealed),
        uses.use_pool,
        ("shardcore/io/files.py:read_pool", "shardcore/cli/published.py:_with_statistics_of"),
    ),
    "plan": Format(
        ("plan.json",), _json("plan.json", sealed), uses.use_plan, ("shardcore/io/files.py:read_plan",)
    ),
    "grouped": Format(
        ("grouped.json",),
        _json("grouped.json", sealed),
        uses.use_grouped,
        ("shardcore/io/grouped_plans.py:is_grouped", "shardcore/io/grouped_plans.py:read_grouped"),
    ),
    "towers": Format(
        ("towers.json",), _json("towers.json"), uses.use_towers, ("shardcore/io/towers.py:read_towers",)
    ),
    "offers": Format(
        ("offers.json",),
        _json("offers.json"),
        uses.use_offers,
        ("shardcore/search/decisions/provision.py:read_offers",),
    ),
    "model": Format(
        ("model",),
        _model("model"),
        uses.use_model,
        (
            "shardcore/cost/neural.py:load",
            "shardcore/io/model_files.py:read_model",
            "shardcore/io/model_files.py:model_digest",
        ),
    ),
    "policy": Format(
        ("policy",), _model("policy"), uses.use_policy, ("shardcore/search/learned/policy.py:read_policy",)
    ),
    "plans": Format(
        ("plans",),
        damage_decision,
        uses.use_plans,
        (
            "shardcore/plans/store.py:_read",
            "shardcore/plans/store.py:is_whole",
            "shardcore/plans/store.py:_pointer",
            "shardcore/plans/store.py:_holder",
            "shardcore/plans/store.py:load_page",
        ),
    ),
    "replays": Format(
        ("replays",),
        _json("replays/replays.json", sealed),
        uses.use_replays,
        ("shardcore/io/replays.py:_read", "shardcore/io/replays.py:_is_ours"),
    ),
    "measurements": Format(
        ("measurements",),
        damage_part,
        uses.use_measurements,
        ("shardcore/io/dataset_parts.py:_read_part", "shardcore/io/dataset_parts.py:_bounded"),
    ),
    "hot_ids": Format(
        ("hot.safetensors",),
        _tensors("hot.safetensors"),
        uses.use_hot_ids,
        ("shardcore/io/hot_ids.py:read_hot_ids", "shardcore/io/tensor_files.py:read_tensors"),
    ),
    "row_counts": Format(
        ("counts.safetensors",),
        _tensors("counts.safetensors"),
        uses.use_row_counts,
        ("shardcore/io/row_counts.py:read_row_counts",),
    ),
    "batch": Format(
        ("batch.pt", "batch.pt.gz"),
        damage_batch,
        uses.use_batch,
        (
            "shardcore/io/dlrm_datasets.py:_read_batch",
            "shardcore/io/dlrm_datasets.py:_unpacked",
            "shardcore/io/dlrm_datasets.py:_require_stored",
        ),
    ),
    "fbgemm": Format(
        ("fbgemm",),
        _any(_json(f"fbgemm/{uses.REPORT}"), _json(f"fbgemm/{uses.TABLES}")),
        uses.use_fbgemm,
        ("shardcore/torchrec/fbgemm_statistics.py:read_statistics",),
    ),
    "params": Format(
        ("params.yaml",),
        _yaml("params.yaml"),
        uses.use_params,
        ("tasks/params.py:section", "tasks/params.py:require_section", "tasks/refresh.py:override_params"),
    ),
    "lock": Format(
        ("dvc.lock",),
        _yaml("dvc.lock"),
        uses.use_lock,
        ("tasks/cache.py:results", "tasks/train.py:data_version"),
    ),
    "cache": Format(
        ("cache",),
        _json(f"cache/{uses.ENTRY}"),
        uses.use_cache,
        ("tasks/cache.py:_entries", "tasks/cache.py:_md5"),
    ),
    "users": Format(
        (".dvc",),
        _json(".dvc/tmp/rwlock"),
        uses.use_users,
        ("tasks/refresh.py:forget_dead_users", "tasks/refresh.py:why"),
    ),
    "request": Format(("request.json",), _json("request.json"), uses.use_request, ()),
}
if HAS_TORCHREC:
    FORMATS |= {
        "torchrec": Format(
            ("torchrec.json",),
            _json("torchrec.json", sealed),
            uses.use_torchrec,
            ("shardcore/torchrec/plan_files.py:_read",),
        ),
        "dmp": Format(
            ("dmp.json",),
            _json("dmp.json", sealed),
            uses.use_dmp,
            ("shardcore/torchrec/dmp_collection.py:read_dmp_collection",),
        ),
        "rows": Format(
            ("rows",),
            damage_rows,
            uses.use_rows,
            ("shardcore/torchrec/hot_cold_rows.py:_complete", "shardcore/torchrec/hot_cold_rows.py:_read"),
        ),
    }
