"""Compile what the suite uses and keep it on disk (half a minute, once): otherwise each worker does, at the
same time.

    python tests/warm_up.py
"""

from shardcore.cost import compiled
from shardcore.search import bound_compiled
from shardcore.search.anneal import compiled as annealing


def warm_up() -> list[str]:
    """Signatures are given, so that importing compiles, or reads what was compiled; says for what."""
    functions = {**vars(annealing), **vars(compiled), **vars(bound_compiled)}
    return sorted(name for name, f in functions.items() if getattr(f, "nopython_signatures", None)
                  and f.stats.cache_path)


if __name__ == "__main__":
    print("compiled:", ", ".join(warm_up()))
