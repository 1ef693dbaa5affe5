"""Pages of published plans."""

from shardcore.plans import places, store


def stored_page(root, name, version):
    """A version's report page."""
    return (places.open_place(root) / name / "versions" / version / store.PAGE).read_bytes()
