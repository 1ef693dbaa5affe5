"""Memory of a model's dense part, measured by two steps on the CPU.

job = measured_job(model, batch, lambda parameters: torch.optim.Adam(parameters), Job(pipeline="sparse_dist"))
planner = ShardCorePlanner(topology, batch_size, job=job)

Collections of embeddings are replaced by modules that give zeros, so their weights may be on the meta device. A mode
of torch's dispatcher sees every tensor that an operation makes, and when it goes. Memory within an operation does
not count. Gradients go into DDP's buckets, as TorchRec's default wrapper has them (gradient_as_bucket_view).
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardcore.core.job import PIPELINES, Job
from shardcore.core.validation import require, require_type
from shardcore.torchrec.modules import ModelTable, tables_of_model

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

    Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def measured_job(
    module: nn.Module, batch: Any, optimizer: Optimizer, job: Job | None = None, on_cpu: bool = False
) -> Job:
    """Job with the memory of a model's dense part, measured on the CPU: `dense_bytes` and the fields after it.

    module: as TorchRec's pipelines take it: module(batch) gives the loss, and anything else. It is not changed.
    batch: a local batch of the job, on the CPU.
    optimizer: makes the dense optimizer of some parameters.
    job: its other properties. None: the default.
    on_cpu: whether the job trains on CPUs. On GPUs torch's optimizers update all parameters at once (foreach).

    Raises ShardCoreError for a model without a loss, and for features with batches of their own sizes.
    """
    require_type(module, nn.Module, "module", "a torch.nn.Module, the model")
    job = job or Job()
    dense = _copy_without_embeddings(module, PIPELINES[job.pipeline].looks_up_ahead)
    parameters = [p for p in dense.parameters() if p.requires_grad]
    stepping = optimizer(parameters) if parameters else None
    for group in stepping.param_groups if stepping and not on_cpu else ():
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    tensors = list(_tensors_of_batch(batch))
    known = [*dense.parameters(), *dense.buffers(), *tensors]
    # The second step is that of a job: the optimizer has its state.
    for _ in range(2):
        activations = _peak_activation_bytes(dense, batch, known)
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with _LiveBytes([*known, *gradients, *_optimizer_state_tensors(stepping)]) as live:
            if stepping:
                stepping.step()
        for parameter in parameters:
            parameter.grad = None
    kept = [*dense.parameters(), *dense.buffers(), *parameters, *_optimizer_state_tensors(stepping)]
    ids = sum(
        _tensor_bytes(tensor)
        for leaf in _leaves_of_batch(batch)
        if not isinstance(leaf, torch.Tensor)
        for tensor in _tensors_of_batch(leaf)
    )
    return dataclasses.replace(
        job,
        dense_bytes=sum(map(_tensor_bytes, kept)),
        activation_bytes=activations,
        update_bytes=live.peak,
        input_bytes=sum(map(_tensor_bytes, tensors)) - ids,
    )


def _peak_activation_bytes(dense: nn.Module, batch: Any, known: Iterable[torch.Tensor]) -> int:
    """Peak bytes of tensors in a forward and backward pass, without outputs of embeddings and their gradients."""

    def drop_gradient(parameter: torch.Tensor) -> None:
        parameter.grad = None  # copied to DDP's bucket, which is counted apart

    hooks = [
        p.register_post_accumulate_grad_hook(drop_gradient) for p in dense.parameters() if p.requires_grad
    ]
    with _LiveBytes(known) as live:
        result = dense(batch)
        loss = result[0] if isinstance(result, tuple) else result
        require(
            isinstance(loss, torch.Tensor) and loss.requires_grad,
            f"the model gives {type(loss).__name__} first; it needs to be the loss, with a gradient, as TorchRec's "
            "pipelines take it",
        )
        outputs = sum(m.out_bytes for m in dense.modules() if isinstance(m, _ZeroEmbeddings))
        torch.sum(loss, dim=0).backward()
    for hook in hooks:
        hook.remove()
    # While activations are alive, outputs are there; the timeline counts these, and their gradients.
    return max(0, live.peak - 2 * outputs)


class _LiveBytes(TorchDispatchMode):
    """Torch dispatch mode that counts the bytes of live tensors.

    peak: the most that were alive at once. known: tensors that do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self._add_storage(tensor.untyped_storage())
        return result

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive += n_bytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._remove_storage, key, n_bytes)

    def _remove_storage(self, key: int, n_bytes: int) -> None:
        self._seen.discard(key)
        self.alive -= n_bytes


def _copy_without_embeddings(module: nn.Module, detached: bool) -> nn.Module:
    """CPU copy of a model, with modules that return zeros in place of embedding collections.

    detached: whether outputs of collections are kept until the step ends, with their gradients.
    """
    tables: dict[str, list[ModelTable]] = {}
    for table in tables_of_model(module, whole=True).values():
        tables.setdefault(table.path, []).append(table)
    # A copy that never copies weights of tables: deepcopy finds these modules copied already.
    copied = {id(module.get_submodule(path)): _ZeroEmbeddings(of, detached) for path, of in tables.items()}
    require(id(module) not in copied, "the model is a collection itself; it has no dense part to measure")
    dense = copy.deepcopy(module, dict(copied))
    meta = any(t.is_meta for t in (*dense.parameters(), *dense.buffers()))
    return dense.to_empty(device="cpu") if meta else dense.cpu()


class _ZeroEmbeddings(nn.Module):
    """Zeros in place of outputs of a collection's tables.

    out_bytes: bytes of the last outputs.
    """

    def __init__(self, tables: list[ModelTable], detached: bool) -> None:
        from torchrec.modules.embedding_modules import get_embedding_names_by_table

        super().__init__()
        self.tables, self.detached, self.out_bytes = tables, detached, 0
        self.names = get_embedding_names_by_table([t.config for t in tables])

    def forward(self, features: KeyedJaggedTensor) -> Any:
        from torchrec import JaggedTensor, KeyedTensor

        require(
            not features.variable_stride_per_key(),
            "features of the batch have batches of their own sizes (VBE); give a batch in which all have one",
        )
        of_tables = list(zip(self.tables, self.names, strict=True))
        found: Any = {}
        if self.tables[0].pooled:
            names = [name for _, names in of_tables for name in names]
            dims = [t.config.embedding_dim for t, names in of_tables for _ in names]
            found = KeyedTensor(names, dims, self._zero_output(features.stride(), sum(dims)))
        else:
            for table, names in of_tables:
                for feature, name in zip(table.config.feature_names, names, strict=True):
                    lengths = features[feature].lengths()
                    values = self._zero_output(int(lengths.sum()), table.config.embedding_dim)
                    found[name] = JaggedTensor(values, lengths=lengths)
        self.out_bytes = (
            _tensor_bytes(found.values())
            if self.tables[0].pooled
            else sum(_tensor_bytes(x.values()) for x in found.values())
        )
        return (found, None) if self.tables[0].wrapper_name.startswith("ManagedCollision") else found

    def _zero_output(self, rows: int, columns: int) -> torch.Tensor:
        if self.detached:
            return torch.zeros(rows, columns, requires_grad=True)
        # Not a leaf: it lives as long as the dense part needs it.
        return _GradientFreeZeros.apply(torch.zeros(1, requires_grad=True), rows, columns)


class _GradientFreeZeros(torch.autograd.Function):
    """Zeros whose gradient goes where it is no concern of the dense part."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        return None, None, None


def _tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _optimizer_state_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Tensors in an optimizer's state; none without an optimizer."""
    leaves = tree_leaves(dict(optimizer.state)) if optimizer else []
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _tensors_of_batch(batch: Any) -> Iterator[torch.Tensor]:
    """Tensors in a batch, however nested; of a KeyedJaggedTensor its values, lengths and weights."""
    for part in _leaves_of_batch(batch):
        if isinstance(part, torch.Tensor):
            yield part
        else:
            yield from (t for t in (part.values(), part.lengths(), part.weights_or_none()) if t is not None)


def _leaves_of_batch(batch: Any) -> Iterator[Any]:
    """Tensors and KeyedJaggedTensors in a batch of nested mappings, lists and objects."""
    from torchrec import KeyedJaggedTensor

    if isinstance(batch, torch.Tensor | KeyedJaggedTensor):
        yield batch
        return
    values: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, list | tuple):
        values = batch
    elif hasattr(batch, "__dict__"):
        values = vars(batch).values()
    for value in values:
        yield from _leaves_of_batch(value)
