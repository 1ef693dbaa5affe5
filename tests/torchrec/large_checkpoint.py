"""Save and load a table that is larger than the memory which the process may have.

    python tests/torchrec/large_checkpoint.py --gib 20 --mib 512 --folder /tmp/large

Weights lie in sparse files, which are mapped. The limit is on private memory (RLIMIT_DATA), beyond what the process has
before the save: torch fails to allocate more. Takes twice the size on the disk. Prints seconds, and whether all bytes
are equal.
"""

from __future__ import annotations

import argparse
import filecmp
import resource
import time
from pathlib import Path

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig

from shardcore.torchrec.moves.checkpoints import load_rows, save_rows

DIM = 64


def mapped_table(path: Path, rows: int) -> EmbeddingCollection:
    """Collection with one table, whose weights are a new sparse file of zeros."""
    configs = [EmbeddingConfig(name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"])]
    with path.open("wb") as file:
        file.truncate(rows * DIM * 4)
    mapped = torch.from_file(str(path), shared=True, size=rows * DIM, dtype=torch.float32)
    made = EmbeddingCollection(configs, device=torch.device("meta"))
    made.embeddings["t"].weight = torch.nn.Parameter(mapped.view(rows, DIM))
    return made


def private_mib(field: str) -> float:
    """MiB of this process: VmData, which RLIMIT_DATA bounds, or RssAnon."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=20.0, help="size of the table")
    parser.add_argument("--mib", type=int, default=512, help="private memory beyond that before the save")
    parser.add_argument("--folder", type=Path, required=True, help="for the files; it must not exist")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    rows = int(args.gib * 2**30) // (DIM * 4)
    # A first save imports and allocates what each has.
    save_rows(mapped_table(args.folder / "small.bin", 9), args.folder / "small")
    saved = mapped_table(args.folder / "saved.bin", rows)
    marked = torch.linspace(0, rows - 1, 1000, dtype=torch.float64).long()
    with torch.no_grad():
        saved.embeddings["t"].weight[marked] = torch.randn(len(marked), DIM)
    limit = int((private_mib("VmData") + args.mib) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for name, work, model in (
        ("save", save_rows, saved),
        ("load", load_rows, mapped_table(args.folder / "loaded.bin", rows)),
    ):
        start = time.perf_counter()
        work(model, args.folder / "rows")
        print(
            f"{name}: {time.perf_counter() - start:.0f} s, {private_mib('RssAnon'):.0f} MiB private",
            flush=True,
        )
    equal = filecmp.cmp(args.folder / "saved.bin", args.folder / "loaded.bin", shallow=False)
    print("all bytes are equal" if equal else "bytes differ")


if __name__ == "__main__":
    main()
