"""Kept problems: what is compared between two commits, and plans that enumerations find."""

from bench import kept


def found(**costs: float | None) -> dict:
    return {
        name: {"ms": ms, "seconds": 1.0} if ms else {"refused": "too large", "seconds": 1.0}
        for name, ms in costs.items()
    }


def test_dearer_and_refused_plans_are_named_and_others_are_not():
    old = {"p": {"problem": "p", "found": found(same=1.0, dearer=1.0, cheaper=2.0, refused=1.0, new=None)}}
    rows = [{"problem": "p", "found": found(same=1.0005, dearer=1.02, cheaper=1.0, refused=None, new=3.0)}]
    table, worse = kept.compare_with_old_run(rows, old, ["same", "dearer", "cheaper", "refused", "new"])
    assert worse == ["p, dearer: 1 ms, now 1.02 ms", "p, refused: 1 ms, now too large"]
    assert "50.00%" in next(line for line in table.splitlines() if line.startswith("cheaper"))


def test_a_problem_of_another_run_keeps_its_memory():
    assert kept.draw_suite_problem("ordinary", 9, 12_345).topology.devices[0].memory_bytes == 12_345
    assert (
        kept.draw_suite_problem("ordinary", 9).tables == kept.draw_suite_problem("ordinary", 9, 12_345).tables
    )
