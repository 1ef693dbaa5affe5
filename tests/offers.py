"""Offers of machines, and their files."""

from pathlib import Path
from typing import Any

from shardcore.io import writing

LEAST = {"name": "box", "devices": 2, "memory_bytes": 1 << 30, "price_per_hour": 3.0}
"""Fields that an offer needs, besides a model or hardware."""
BOX = {
    **LEAST,
    "model": "model",
    "most_hosts": 2,
    "links": [
        {"level": "within_host", "gbps": 10.0, "latency_ms": 0.1},
        {"level": "between_hosts", "gbps": 1.0, "shared": True, "latency_ms": 0.1},
    ],
}


def write_offers(path: str | Path, *offers: dict[str, Any]) -> None:
    writing.write_json(path, {"schema": "shardcore/offers", "version": 1, "offers": offers})
