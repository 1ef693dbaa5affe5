"""Names in traces, and the parts of a step that they stand for: rows of two tables.

Rows are meant for torch 2.0 to 2.13, TorchRec 0.4 to 1.8, FBGEMM 0.5 to 1.8, gloo, NCCL and RCCL. They were
tried on traces of torch 2.13 with gloo, and of torch of 2023 with NCCL on V100s; and on the names of all
kernels in FBGEMM 1.6 for CUDA 13 and in NCCL 2.28.

On the CPU an op is its own work. On a GPU a kernel belongs to the innermost name around its launch that a row
knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

STEP = re.compile(r"ProfilerStep#(\d{1,18})\b")
STARTS_COLLECTIVE = re.compile(r"c10d::|nccl:|record_param_comms$")
"""Names of host frames that start a collective."""
GLOO = re.compile(r"gloo:")


@dataclass(frozen=True)
class KernelName:
    """Pattern of event names in a trace, and the step part (of TRACED_PARTS) that they belong to.

    works: False where a frame waits, or only contains others. Its own time is that of collectives in flight.
    """

    pattern: re.Pattern[str]
    part: str
    works: bool = True


def _kernel_name_pattern(part: str, *patterns: str, works: bool = True) -> KernelName:
    """Make a Name (pattern of traced kernels) from several regular expressions."""
    return KernelName(re.compile("|".join(patterns)), part, works)


NAMES = (
    # Waits come first: their names also hold those of what they wait for.
    _kernel_name_pattern(
        "outputs",
        r"EmbeddingBagCollectionAwaitable|EmbeddingCollectionAwaitable|PooledEmbeddingsAwaitable",
        r"SequenceEmbeddingsAwaitable|VariableBatchPooled\w*Awaitable",
        r"^(All2All_Pooled|All2All_Seq|ReduceScatter|All2All_VPooled|Variable_Batch)\w*_Wait$",
        works=False,
    ),
    _kernel_name_pattern(
        "gradients",
        r"(All2All|ReduceScatter|AllGather|Variable)\w*_ReqBackward",
        works=False,
    ),
    _kernel_name_pattern("ids", r"Splits\w*Awaitable|KJT\w*Awaitable|KJTList\w*", works=False),
    # Input distribution. (Pooled) outputs have recats as well, under names of their own.
    _kernel_name_pattern(
        "ids",
        r"sparse_data_dist|all2all_data:|\[splits_dist\]|\[input_dist\]|runtime_forward_assemble_KJT",
        r"recat_permute_gen|input_dist|KJTAllToAll",
        works=False,
    ),
    _kernel_name_pattern(
        "ids",
        r"permute_(1D|2D)_|block_bucketize|bucketize_sparse|keyed_jagged",
        r"fbgemm::permute_(sparse|sequence)|asynchronous_(batched_complete|complete|inclusive|exclusive)_cumsum",
        r"expand_into_jagged|populate_bucketized|jagged_unique_indices|invert_permute|segment_sum_csr",
        r"_batched_complete_cumsum_kernel|(delinearize_unique_index|unique_indices_length|compute_hash_size)_kernel",
    ),
    # Gradients of lookups, with the sort of ids and the fused optimizer.
    _kernel_name_pattern(
        "lookup_backward",
        r"SplitLookupFunction|LookupFunction_\w+_Op|(split|dense|ssd)_embedding\w*_backward",
        r"embedding_backward_\w*|linearize_index|transpose_embedding_input|grad_mean_(vbe_)?kernel",
        r"embedding\w*_grad_indice_weights|split_(embedding\w*|rowwise_adagrad_)update|embedding_inplace_update",
        r"find_long_segments|EmbeddingBagBackward",
    ),
    _kernel_name_pattern(
        "lookup_forward",
        r"\[lookup\]",
        r"(split|dense|ssd)_embedding\w*_(forward|lookup)|embedding\w*_codegen_lookup|embedding_bag\b",
        r"bounds_check_indices|lru_cache|lfu_cache|linear_cache|lxu_cache|direct_mapped|emulate_cache|tbe_\w*",
        r"linearize_cache_indices|get_(cache|unique)_indices|generate_vbe_metadata|get_infos_metadata",
        r"int_nbit_split_embedding",
    ),
    # Exchange of outputs and of their gradients.
    _kernel_name_pattern(
        "gradients",
        r"(All2All|ReduceScatter|AllGather|Variable)\w*_WaitBackward|alltoall_bwd|reduce_scatter_bwd",
        r"recat_(embedding_grad_output|copy_async_kernel)",
        r"PermutePooledEmbs\w*Backward|CppNode<fbgemm_gpu::PermutePooledEmbs|CppNode<\w*permute_pooled",
        r"PermuteMultiEmbedding\w*Backward|CppNode<.*(permute_multi_embedding|PermuteMultiEmbedding|KTRegroup)",
    ),
    _kernel_name_pattern(
        "outputs",
        r"permute_(duplicate_)?pooled_embs|permute_multi_emb|\[output_dist\]|alltoall_fwd|reduce_scatter_fwd",
        r"(All2All|ReduceScatter|AllGather|Variable)\w*_Req$|regroup_keyed_tensor|kt_regroup|recat_pooled",
        r"merge_pooled_embeddings|reorder_batched",
    ),
    # Around the embeddings.
    _kernel_name_pattern(
        "optimizer", r"Optimizer\.(step|zero_grad)#|multi_tensor_apply|FusedAdam|## zero_grad", r"_fused_adam"
    ),
    _kernel_name_pattern("optimizer", r"## optimizer", works=False),
    _kernel_name_pattern(
        "data",
        r"enumerate\(DataLoader\)|_DataLoaderIter|Memcpy HtoD|copy_batch_to_gpu|next_batch|wait_for_batch",
        works=False,
    ),
    _kernel_name_pattern(
        "dense_backward", r"autograd::engine|Backward\d*$|AccumulateGrad|torch::distributed::reducer"
    ),
    _kernel_name_pattern("dense_backward", r"## backward", works=False),
    _kernel_name_pattern(
        "dense_forward", r"## forward|DistributedDataParallel\.forward|nn\.Module:", works=False
    ),
    _kernel_name_pattern("host", r"^## ", works=False),
)
"""Frames and kernels. A name is that of the first row that matches."""

DENSE_OPS = re.compile(r"aten::|torch::|prims::|TorchDynamo|Torch-Compiled|inductor|triton")
"""Ops that are of the dense part where no name around them says otherwise."""
DENSE_KERNELS = re.compile(
    r"at::native|at_cuda_detail|at::cuda|cub::|thrust::|gemm|gemv|cublas|cutlass|cudnn|splitK|dot_kernel"
    r"|reduce_1Block|triton_|Memcpy|Memset|elementwise|softmax|layer_norm|flash_|fmha|nvjet|xmma|Cijk_"
)
"""Kernels of torch's own ops, by their names. They are dense where their launch says nothing else."""

COLLECTIVES = (
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all_gather", re.compile(r"all_?gather", re.I)),
    ("all_reduce", re.compile(r"all_?reduce", re.I)),
    ("all_to_all", re.compile(r"all_?to_?all|sendrecv", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
    ("barrier", re.compile(r"barrier", re.I)),
)
"""Collectives, by names of c10d, gloo and NCCL. NCCL runs all-to-alls as sends and receives."""
NCCL_KERNEL = re.compile(r"nccl|rccl|mscclKernel", re.I)
RUN_AS = {"reduce_scatter": ("reduce_scatter", "all_reduce"), "broadcast": ("broadcast", "all_gather")}
"""Collectives that a backend may run by another. Gloo sums in an all-reduce."""


@cache
def match_kernel_name(name: str) -> KernelName | None:
    """Name pattern that matches a traced frame or kernel; None if unknown."""
    return next((row for row in NAMES if row.pattern.search(name)), None)


@cache
def match_collective(name: str) -> str | None:
    """Collective that a traced event's name means; None if the event is no collective."""
    return next((collective for collective, pattern in COLLECTIVES if pattern.search(name)), None)


def collective_role(collective: str, part: str) -> str:
    """Role of a traced collective (TracedExchange.role), from the step part that starts the collective."""
    if part in ("ids", "outputs", "gradients"):
        return part
    return "reduce" if collective == "all_reduce" else "other"
