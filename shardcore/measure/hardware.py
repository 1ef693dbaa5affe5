"""What is measured on: the device's name, and FBGEMM fit for the torch at hand."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from shardcore.core.errors import ShardCoreError
from shardcore.measure.devices import device_of

AUTO = "auto"


def detect_device() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if device_of("cuda").is_there() else "cpu"


def require_device(device: str) -> None:
    """Raise ShardCoreError where there is no such device."""
    if not device_of(device).is_there():
        raise ShardCoreError(
            "there is no CUDA device here, or this torch was built without CUDA; measure on 'cpu'"
        )


def hardware_name(device: str) -> str:
    """The name of this machine's device as settings and model registries use it: "nvidia-h200",
    "cpu-amd-epyc-9654". Raises ShardCoreError where there is no such device."""
    require_device(device)
    if device == "cuda":
        return _slug(device_of(device).product())
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    name = found.group(1) if found else "unknown"
    return "cpu-" + _slug(re.sub(r"\((R|TM)\)|CPU|@.*|\d+-Core|Processor", " ", name))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def require_fbgemm(device: str) -> None:
    """Import FBGEMM and run one row of it on the device; raises ShardCoreError saying what to install where
    FBGEMM is missing, was built for another torch, or is the CPU build on a GPU machine, and where there is
    no such device."""
    require_device(device)
    try:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training  # noqa: F401 (loads the ops)

        place = device_of(device).place
        offsets = torch.tensor([0, 1], device=place)
        torch.ops.fbgemm.segment_sum_csr(1, offsets, torch.ones(1, device=place))
    except ImportError as error:
        raise ShardCoreError(
            "FBGEMM is not installed: pip install 'shardcore[measure]' (or [measure-gpu] on a CUDA machine); "
            f"importing it said: {_line(error)}"
        ) from None
    except (AttributeError, OSError, RuntimeError) as error:
        raise ShardCoreError(
            f"FBGEMM does not match torch {torch.__version__} (1.8 goes with 2.13, "
            f"1.7 with 2.12, 1.6 with 2.11): {_line(error)}"
        ) from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
