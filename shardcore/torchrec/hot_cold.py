"""HotColdEmbeddingCollection: an EmbeddingCollection whose hot rows are on every rank, and warm ones on every host.

    hot = HotIds.of_counts("history", counts, hot=20_000)
    model.history = HotColdEmbeddingCollection(configs, {"history": hot}, device="meta")
    model = DistributedModelParallel(model, plan=to_torchrec(plan, problem, model), ...)

Hot rows are plain parameters, so DistributedModelParallel gives them to DDP, and the job's dense optimizer
updates them. The others are an EmbeddingCollection, `cold`, that TorchRec shards. Outputs are those of an
EmbeddingCollection of the whole tables. Warm rows are those of warm_rows.py.

Shapes: L ids of a feature, H of them hot, D columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardcore.core.errors import ShardCoreError
from shardcore.io.hot_ids import HotIds
from shardcore.tables.hot_rows import COLD
from shardcore.torchrec.agreement import rank_and_ranks
from shardcore.torchrec.warm_rows import DenseRows, Unit, WarmRows

if TYPE_CHECKING:
    from torchrec import EmbeddingConfig, JaggedTensor, KeyedJaggedTensor


class HotColdEmbeddingCollection(nn.Module):
    """A drop-in for an EmbeddingCollection. `hot_ids` and `kept_ids` (hot or warm) have ids by table.

    tables: the configs of the whole tables.
    hot: hot ids by table. Tables without any are cold as a whole.
    device: device of the parameters, as for an EmbeddingCollection.
    warm: ids by table, of tables with hot ids, that each unit of ranks has once.
    unit_ranks: number of ranks of a unit: of a host, by default, or of a pod.

    Raises ShardCoreError for hot or warm ids of another table, ids that are both, and for a feature of several tables.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        hot: Mapping[str, HotIds],
        device: torch.device | str | None = None,
        warm: Mapping[str, HotIds] | None = None,
        unit_ranks: int | None = None,
    ) -> None:
        from torchrec import EmbeddingCollection  # takes seconds

        super().__init__()
        self._tables = {config.name: config for config in tables}
        self.hot_ids, self._warm_ids = dict(hot), dict(warm or {})
        self._features: dict[str, str] = {}
        self._checked = False
        for config in tables:
            for feature in config.feature_names:
                if feature in self._features:
                    raise ShardCoreError(
                        f"feature {feature!r} has tables {self._features[feature]!r} and {config.name!r}; a "
                        "HotColdEmbeddingCollection needs one for each"
                    )
                self._features[feature] = config.name
        for what, name, ids in self._all_ids():
            if name not in self._tables:
                raise ShardCoreError(
                    f"{what} ids are given for table {name!r}, which is not among the tables"
                )
            rows = self._tables[name].num_embeddings
            if (ids.table, ids.rows) != (name, rows):
                raise ShardCoreError(
                    f"table {name!r} of {rows} rows was given the {what} ids of {ids.table!r} of {ids.rows} rows; it "
                    "needs its own"
                )
        if lacking := sorted(self._warm_ids.keys() - hot.keys()):
            raise ShardCoreError(f"table {lacking[0]!r} has warm ids and no hot ones; it needs some")
        self.hot = DenseRows(self._tables, {name: len(ids.ids) for name, ids in hot.items()}, device)
        counts = {name: len(ids.ids) for name, ids in self._warm_ids.items()}
        # Units need equal hosts, which rows that are only hot or cold do not.
        unit = Unit.of_rank(unit_ranks) if counts else Unit()
        self.warm = WarmRows(self._tables, counts, device, unit)
        # Of each table, the ids that are hot or warm.
        self.kept_ids = {name: self._kept(name) for name in hot}
        for what, name, ids in self._all_ids():
            # Part of each checkpoint, so that weights of other ids are not loaded.
            self.register_buffer(f"{what}_ids_{name}", torch.from_numpy(ids.ids.copy()))
        for name in self._warm_ids:
            kept = torch.from_numpy(self.kept_ids[name].ids.copy())
            self.register_buffer(f"kept_ids_{name}", kept, persistent=False)
        self.cold = EmbeddingCollection(
            [
                replace(c, name=c.name + COLD, num_embeddings=self.kept_ids[c.name].cold_rows)
                if c.name in hot
                else c
                for c in tables
            ],
            device=torch.device(device or "cpu"),
        )

    def _all_ids(self) -> Iterator[tuple[str, str, HotIds]]:
        """Ids that are given, as ("hot" or "warm", table, ids)."""
        for what, of_tables in (("hot", self.hot_ids), ("warm", self._warm_ids)):
            yield from ((what, name, ids) for name, ids in of_tables.items())

    def _kept(self, name: str) -> HotIds:
        """The ids of a table that are hot or warm."""
        hot = self.hot_ids[name]
        if name not in self._warm_ids:
            return hot
        warm = self._warm_ids[name].ids
        if len(both := np.intersect1d(hot.ids, warm)):
            raise ShardCoreError(
                f"table {name!r} was given id {both[0]} as hot and as warm; it needs to be one of both"
            )
        return HotIds(name, hot.rows, np.union1d(hot.ids, warm))

    def warm_ids_here(self) -> dict[str, np.ndarray]:
        """[W / L] the ids of this rank's warm rows, by table."""
        unit = self.warm.unit
        return {name: ids.ids[unit.rank :: unit.size].copy() for name, ids in self._warm_ids.items()}

    def hot_tables(self) -> dict[str, EmbeddingConfig]:
        """The configs of hot rows, by name of the whole table."""
        return {
            name: replace(self._tables[name], num_embeddings=len(ids.ids))
            for name, ids in self.hot_ids.items()
        }

    def whole_tables(self) -> dict[str, EmbeddingConfig]:
        return dict(self._tables)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """One output a lookup, as of an EmbeddingCollection of the whole tables.

        Raises ShardCoreError for ids outside their table (on a CPU; on a GPU FBGEMM checks those that are
        not hot), and at the first call if ranks have different hot ids.
        """
        from torchrec import JaggedTensor, KeyedJaggedTensor

        # Once, as it is a collective: all ranks make their first call together.
        if not self._checked:
            self._require_same_everywhere()
            self.warm.join()
            self._checked = True
        lookups = features.to_dict()
        # Only features of tables with hot rows are split.
        split = {
            f: self._split(lookups[f], name) for f, name in self._features.items() if name in self.hot_ids
        }
        ids = [split[f].cold_ids if f in split else lookups[f].values() for f in self._features]
        lengths = [split[f].cold_lengths if f in split else lookups[f].lengths() for f in self._features]
        # Cold rows of all features are one lookup, which TorchRec shards.
        keys = list(self._features)
        cold = self.cold(KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=torch.cat(lengths)))
        # Features without hot rows have their outputs as they are.
        outputs = {f: cold[f] for f in self._features}
        for f, parts in split.items():
            kept = self._look_up(self._features[f], parts.hot_rows)
            values = torch.cat([kept, outputs[f].values()])[parts.order]
            outputs[f] = JaggedTensor(
                values=values, lengths=lookups[f].lengths(), offsets=lookups[f].offsets()
            )
        return outputs

    def _look_up(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        """Hot rows, which are on every rank, and warm ones. kept: [H] numbers among the ids that are not cold."""
        if name not in self._warm_ids:
            return nn.functional.embedding(kept, self.hot[name])
        warm_ids, hot_ids = getattr(self, f"warm_ids_{name}"), getattr(self, f"hot_ids_{name}")
        ids = getattr(self, f"kept_ids_{name}")[kept]
        at = torch.searchsorted(warm_ids, ids)
        is_warm = warm_ids[at.clamp(max=len(warm_ids) - 1)] == ids
        hot = nn.functional.embedding(torch.searchsorted(hot_ids, ids[~is_warm]), self.hot[name])
        warm = self.warm.look_up(name, at[is_warm])
        # Position of each among the hot ones, then the warm ones.
        before = torch.cumsum(is_warm, 0)
        order = torch.where(
            is_warm, len(hot) + before - 1, torch.arange(len(ids), device=ids.device) - before
        )
        return torch.cat([hot, warm])[order]

    def _split(self, feature: JaggedTensor, name: str) -> _Split:
        # The buffer moves with the module to its device.
        ids = feature.values()
        hot = getattr(self, f"{'kept' if name in self._warm_ids else 'hot'}_ids_{name}")
        # A check on a GPU would wait for the device at each step.
        if (
            ids.device.type == "cpu"
            and len(ids)
            and not 0 <= int(ids.min()) <= int(ids.max()) < self._tables[name].num_embeddings
        ):
            raise ShardCoreError(
                f"table {name!r} was given ids {int(ids.min())} to {int(ids.max())}; it has "
                f"{self._tables[name].num_embeddings} rows"
            )
        # [L] number of hot ids below each id. For a hot id it is its row.
        below = torch.searchsorted(hot, ids.to(hot.dtype))
        is_hot = hot[below.clamp(max=len(hot) - 1)] == ids
        # Behind the last id, for the end of the last sample.
        before = nn.functional.pad(torch.cumsum(is_hot, 0), (1, 0))
        hot_lengths = torch.diff(before[feature.offsets()])
        n_hot, before = before[-1], before[:-1]
        # Hot outputs come first, so a cold one lies behind all of them.
        order = torch.where(is_hot, before, n_hot + torch.arange(len(ids), device=ids.device) - before)
        return _Split(
            below[is_hot],
            (ids - below.to(ids.dtype))[~is_hot],
            (feature.lengths() - hot_lengths).to(feature.lengths().dtype),
            order,
        )

    def _require_same_everywhere(self) -> None:
        """Raise ShardCoreError on all ranks if they differ in hot or warm ids."""
        if (ranks := rank_and_ranks()[1]) == 1:
            return
        # Digests instead of ids: few bytes, and equal only for equal ids.
        digests: list[Any] = [None] * ranks
        mine = {(what, name): ids.digest for what, name, ids in self._all_ids()}
        dist.all_gather_object(digests, mine)
        first = digests[0]
        for rank, theirs in enumerate(digests):
            if theirs != first:
                # A rank may also have hot ids of fewer tables.
                what, name = next(n for n in sorted({*theirs, *first}) if theirs.get(n) != first.get(n))
                raise ShardCoreError(
                    f"rank {rank} has other {what} ids of {name!r} than rank 0; all ranks need "
                    f"the same, such as from one file of {what} ids"
                )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for what, name, _ in self._all_ids():
            theirs = state_dict.get(f"{prefix}{what}_ids_{name}")
            ours = getattr(self, f"{what}_ids_{name}")
            if theirs is not None and not torch.equal(theirs.to(ours.device), ours):
                raise ShardCoreError(
                    f"a checkpoint has other {what} ids of table {name!r} than the module; make the module with those "
                    "of the checkpoint, or load rows by ids (load_rows)"
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _Split(NamedTuple):
    """Hot and cold ids of a feature.

    hot_rows: [H] rows of hot ids.
    cold_ids: [L - H] cold rows of the others.
    cold_lengths: [samples] cold ids of each sample.
    order: [L] position of each id's output, hot ones first.
    """

    hot_rows: torch.Tensor
    cold_ids: torch.Tensor
    cold_lengths: torch.Tensor
    order: torch.Tensor


def hot_cold_modules(model: nn.Module) -> Iterator[tuple[str, HotColdEmbeddingCollection]]:
    """The HotColdEmbeddingCollections of a model, with their paths, sharded or not."""
    return (
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, HotColdEmbeddingCollection)
    )
