"""Compile what the suite uses and keep it on disk (20 s, once): otherwise each worker does, at the same time.
conftest.py runs this while workers collect and run the first tests.

    python tests/warm_up.py
"""

from shardcore.cost import compiled
from shardcore.search.anneal import compiled as annealing


def warm_up() -> list[str]:
    """The names of all functions that Python calls, once each is compiled or read from disk."""
    heads = {head.__name__: head for head in (*compiled.HEADS, compiled.multi_head_op_ms)}
    for head in heads.values():
        compiled.compile_head(head)
    entries = {name: f for name, f in vars(annealing).items() if hasattr(f, "ready")}
    for entry in entries.values():
        entry.ready()
    return sorted({**heads, **entries})


if __name__ == "__main__":
    print("compiled:", ", ".join(warm_up()))
