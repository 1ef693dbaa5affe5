"""HotColdEmbeddingCollection: an EmbeddingCollection whose hot rows are on every rank.

    hot = HotIds.from_counts("history", counts, hot=20_000)
    model.history = HotColdEmbeddingCollection(configs, {"history": hot}, device="meta")
    model = DistributedModelParallel(model, plan=to_torchrec(plan, problem, model), ...)

Hot rows are plain parameters, so DistributedModelParallel gives them to DDP, and the job's dense optimizer
updates them. The others are an EmbeddingCollection, `cold`, that TorchRec shards. Outputs are those of an
EmbeddingCollection of the whole tables.

Shapes: L ids of a feature, H of them hot, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require
from shardcore.io.hot_ids import HotIds
from shardcore.tables.hot_rows import COLD
from shardcore.torchrec.moves.agreement import rank_and_world_size

if TYPE_CHECKING:
    from torchrec import EmbeddingConfig, JaggedTensor, KeyedJaggedTensor


class DenseRows(nn.ParameterDict):
    """Rows as plain parameters, by name of the table.

    A separate module: DistributedModelParallel allocates what is on the meta device module by module, and
    calls `reset_parameters` of those that have such parameters.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingConfig],
        rows: Mapping[str, int],
        device: torch.device | str | None,
    ) -> None:
        """tables: the configs of the whole tables. rows: the number of hot rows, of some of them."""
        from torchrec.modules.embedding_configs import data_type_to_dtype

        super().__init__()
        self._of = dict(tables)
        for name, n in rows.items():
            dtype = data_type_to_dtype(tables[name].data_type)
            self[name] = nn.Parameter(torch.empty(n, tables[name].embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize hot rows as an EmbeddingCollection initializes the whole table."""
        for name, weight in self.items():
            config = self._of[name]
            with torch.no_grad():
                if config.init_fn is not None:
                    config.init_fn(weight)
                # Weights on the meta device have no memory to fill.
                elif weight.device.type != "meta":
                    weight.uniform_(config.get_weight_init_min(), config.get_weight_init_max())


class HotColdEmbeddingCollection(nn.Module):
    """A drop-in for an EmbeddingCollection. `hot_ids` has the hot ids by table.

    tables: the configs of the whole tables.
    hot: hot ids by table. Tables without any are cold as a whole.
    device: device of the parameters, as for an EmbeddingCollection.

    Raises ShardCoreError for hot ids of another table, and for a feature of several tables.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        hot: Mapping[str, HotIds],
        device: torch.device | str | None = None,
    ) -> None:
        from torchrec import EmbeddingCollection  # takes seconds

        super().__init__()
        self._tables = {config.name: config for config in tables}
        self.hot_ids = dict(hot)
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
        for name, ids in hot.items():
            require(
                name in self._tables,
                f"hot ids are given for table {name!r}, which is not among the tables",
            )
            rows = self._tables[name].num_embeddings
            require(
                (ids.table, ids.rows) == (name, rows),
                f"table {name!r} of {rows} rows was given the hot ids of {ids.table!r} of {ids.rows} rows; it "
                "needs its own",
            )
            # Part of each checkpoint, so that weights of other ids are not loaded.
            self.register_buffer(f"hot_ids_{name}", torch.from_numpy(ids.ids.copy()))
        self.hot = DenseRows(self._tables, {name: len(ids.ids) for name, ids in hot.items()}, device)
        self.cold = EmbeddingCollection(
            [
                replace(c, name=c.name + COLD, num_embeddings=hot[c.name].cold_rows) if c.name in hot else c
                for c in tables
            ],
            device=torch.device(device or "cpu"),
        )

    def hot_table_configs(self) -> dict[str, EmbeddingConfig]:
        """EmbeddingConfigs of the hot rows, keyed by the name of the whole table."""
        return {
            name: replace(self._tables[name], num_embeddings=len(ids.ids))
            for name, ids in self.hot_ids.items()
        }

    def whole_table_configs(self) -> dict[str, EmbeddingConfig]:
        """EmbeddingConfigs of the whole tables, hot and cold rows together, by name."""
        return dict(self._tables)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Embeddings of each feature's ids, equal to those of an EmbeddingCollection of the whole tables.

        Raises ShardCoreError for ids outside their table (on a CPU; on a GPU FBGEMM checks those that are
        not hot), and at the first call if ranks have different hot ids.
        """
        from torchrec import JaggedTensor, KeyedJaggedTensor

        # Once, as it is a collective: all ranks make their first call together.
        if not self._checked:
            self._require_equal_hot_ids()
            self._checked = True
        lookups = features.to_dict()
        # Only features of tables with hot rows are split.
        split = {
            f: self._split_hot_and_cold(lookups[f], name)
            for f, name in self._features.items()
            if name in self.hot_ids
        }
        ids = [split[f].cold_ids if f in split else lookups[f].values() for f in self._features]
        lengths = [split[f].cold_lengths if f in split else lookups[f].lengths() for f in self._features]
        # Cold rows of all features are one lookup, which TorchRec shards.
        cold = self.cold(
            KeyedJaggedTensor(keys=list(self._features), values=torch.cat(ids), lengths=torch.cat(lengths))
        )
        # Features without hot rows have their outputs as they are.
        outputs = {f: cold[f] for f in self._features}
        for f, parts in split.items():
            hot = nn.functional.embedding(parts.hot_rows, self.hot[self._features[f]])
            values = torch.cat([hot, outputs[f].values()])[parts.order]
            outputs[f] = JaggedTensor(
                values=values, lengths=lookups[f].lengths(), offsets=lookups[f].offsets()
            )
        return outputs

    def _split_hot_and_cold(self, feature: JaggedTensor, name: str) -> _HotColdSplit:
        # The buffer moves with the module to its device.
        ids = feature.values()
        hot = getattr(self, f"hot_ids_{name}")
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
        return _HotColdSplit(
            below[is_hot],
            (ids - below.to(ids.dtype))[~is_hot],
            (feature.lengths() - hot_lengths).to(feature.lengths().dtype),
            order,
        )

    def _require_equal_hot_ids(self) -> None:
        """Raise ShardCoreError on all ranks if ranks differ in their hot ids."""
        if (ranks := rank_and_world_size()[1]) == 1:
            return
        # Digests instead of ids: few bytes, and equal only for equal ids.
        digests: list[Any] = [None] * ranks
        dist.all_gather_object(digests, {name: ids.digest for name, ids in self.hot_ids.items()})
        first = digests[0]
        for rank, theirs in enumerate(digests):
            if theirs != first:
                # A rank may also have hot ids of fewer tables.
                name = next(n for n in sorted({*theirs, *first}) if theirs.get(n) != first.get(n))
                raise ShardCoreError(
                    f"rank {rank} has other hot ids of {name!r} than rank 0; all ranks need "
                    "the same, such as from one file of hot ids"
                )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in self.hot_ids:
            theirs = state_dict.get(f"{prefix}hot_ids_{name}")
            ours = getattr(self, f"hot_ids_{name}")
            require(
                theirs is None or torch.equal(theirs.to(ours.device), ours),
                f"a checkpoint has other hot ids of table {name!r} than the module; make the module with those "
                "of the checkpoint, or load rows by ids (load_rows)",
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _HotColdSplit(NamedTuple):
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
