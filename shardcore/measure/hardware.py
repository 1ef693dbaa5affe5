"""The name of the hardware, and checks that FBGEMM fits the torch at hand."""

from __future__ import annotations

import torch

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require, to_path_name
from shardcore.measure.devices import device_by_name

AUTO = "auto"


def detect_device() -> str:
    """Default device of this machine: "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if device_by_name("cuda").is_available() else "cpu"


def require_device(device: str) -> None:
    """Raise ShardCoreError if this machine has no such device."""
    require(
        # No silent fallback to the CPU: timings would be of other hardware.
        device_by_name(device).is_available(),
        "there is no CUDA device here, or this torch was built without CUDA; measure on 'cpu'",
    )


def hardware_name(device: str) -> str:
    """Name of this machine's hardware in settings and model registries: "nvidia-h200", "cpu-amd-epyc-9654".

    Raises ShardCoreError where there is no such device.
    """
    require_device(device)
    # Path-safe, as the name becomes part of paths and of registry names.
    product = to_path_name(device_by_name(device).product_name())
    return product if device == "cuda" else f"cpu-{product}"


def require_fbgemm(device: str) -> None:
    """Import FBGEMM and run one of its ops on a device, to check the installation.

    Raises ShardCoreError with what to install where FBGEMM is missing, was built for another torch, or is the
    CPU build on a GPU machine, and where there is no such device.
    """
    require_device(device)
    try:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training  # noqa: F401 (loads the ops)

        place = device_by_name(device).place
        offsets = torch.tensor([0, 1], device=place)
        # Importing alone does not show that the compiled ops match this torch.
        torch.ops.fbgemm.segment_sum_csr(1, offsets, torch.ones(1, device=place))
    except ImportError as error:
        raise ShardCoreError(
            "FBGEMM is not installed: pip install 'shardcore[measure]' (or [measure-gpu] on a CUDA machine); "
            f"importing it said: {one_line_message(error)}"
        ) from None
    except (AttributeError, OSError, RuntimeError) as error:
        # A mismatch shows as a missing symbol or operator, not as an ImportError.
        raise ShardCoreError(
            f"FBGEMM does not match torch {torch.__version__} (1.8 goes with 2.13, 1.7 with 2.12, 1.6 with 2.11): "
            f"{one_line_message(error)}"
        ) from None


def one_line_message(error: BaseException | str) -> str:
    """An error's message in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
