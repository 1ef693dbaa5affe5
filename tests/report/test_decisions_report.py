"""The ledger of decisions in words."""

from shardcore.report.decisions_report import MOST_ENTRIES, has_several_proposals, ledger_text
from shardcore.search.decisions.driver import DecisionLedger, LedgerEntry

INNER = DecisionLedger(
    "memory tiers", "all", "least ms of 1 with a plan", (LedgerEntry("all", 2.0, 0.5, 10),)
)


def ledger(n: int) -> DecisionLedger:
    entries = (
        *(LedgerEntry(f"way {i}", None, 0.25, 0, f"too much by {i}", {"hot": 1000 * i}) for i in range(n)),
        LedgerEntry("last", 2.0, 12.0, 30_000, within=INNER),
    )
    return DecisionLedger("ways", "last", "least ms of 1 with a plan", entries)


def test_all_that_was_proposed_is_shown_and_what_is_within_the_best():
    text = ledger_text(ledger(2))
    outer, inner = text.split("\n\n")
    assert [line.split() for line in outer.splitlines()[2:]] == [
        "way 0 0 - 0.2 0 too much by 0".split(),
        "way 1 1,000 - 0.2 0 too much by 1".split(),
        "last (best) - 2.000 12.0 30,000".split(),
        "last: least ms of 1 with a plan".split(),
    ]
    # One proposal is no choice: it wins by itself.
    assert inner.splitlines()[2:] == ["all              2.000  0.5           10"]
    assert (
        has_several_proposals(ledger(1))
        and not has_several_proposals(INNER)
        and not has_several_proposals(None)
    )
    assert ledger_text(None) == ""


def test_of_many_proposals_the_first_are_shown_and_the_best():
    lines = ledger_text(ledger(MOST_ENTRIES + 7)).split("\n\n")[0].splitlines()
    assert len(lines) == 2 + MOST_ENTRIES + 1 + 2 and lines[-3].startswith("last (best)")
    assert lines[-2] == "and 7 more, in the provenance of the plan"
