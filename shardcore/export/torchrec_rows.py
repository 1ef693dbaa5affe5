"""A TorchRec sharder that trains row ranges as the plan has them: any, rising with the ranks, at least a row on each.

TorchRec's own sends id i to rank i // ceil(rows / ranks). FBGEMM's bucketize op takes the positions of arbitrary ranges
(block_bucketize_pos), and TorchRec's row-wise input distribution hands them on where it has them, for hash tables without
collisions alone; here it gets the plan's. Nothing else differs: plans without row-wise tables, and even ones, train as before.

    sharders = [row_sharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})]
    model = DistributedModelParallel(model, plan=to_torchrec(plan, problem, model, uneven_rows=True), sharders=sharders)
"""

from __future__ import annotations

from functools import cache
from typing import Any


def row_sharder(**settings: Any) -> Any:
    """An EmbeddingBagCollectionSharder, of the same settings (fused_params, qcomm_codecs_registry)."""
    return _classes()(**settings)


@cache
def _classes() -> type:
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
    from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding

    class Rows(RwPooledEmbeddingSharding):
        def create_input_dist(self, device: Any = None) -> Any:
            dist = super().create_input_dist(device)
            dist.zch_bucketize_row_pos = [
                torch.tensor([*(part.shard_offsets[0] for part in table.global_metadata.shards_metadata), table.num_embeddings])
                for group in self._grouped_embedding_configs_per_rank[0] for table in group.embedding_tables
                for _ in range(table.num_features())]
            return dist

    class Sharded(ShardedEmbeddingBagCollection):
        @classmethod
        def create_embedding_bag_sharding(cls, sharding_infos: Any, env: Any, device: Any = None,
                                          permute_embeddings: bool = False, qcomm_codecs_registry: Any = None) -> Any:
            if sharding_infos[0].param_sharding.sharding_type != "row_wise":
                return super().create_embedding_bag_sharding(sharding_infos, env, device, permute_embeddings,
                                                             qcomm_codecs_registry)
            return Rows(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)

    class RowSharder(EmbeddingBagCollectionSharder):
        def shard(self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: str | None = None) -> Any:
            return Sharded(module=module, table_name_to_parameter_sharding=params, env=env, fused_params=self.fused_params,
                           device=device, qcomm_codecs_registry=self.qcomm_codecs_registry, module_fqn=module_fqn)

        @property
        def sharded_module_type(self) -> type:
            return Sharded

    return RowSharder
