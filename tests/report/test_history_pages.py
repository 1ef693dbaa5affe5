"""The page of a model's versions."""

from shardcore.report.history_pages import (
    VERSION_HEADERS,
    ModelRecord,
    model_errors_figure,
    model_version_rows,
    model_versions_page,
)

RECORDS = [
    ModelRecord("1", 1.7e9, 6.0, None, "passed, the first", "cpu", ((1.7e9, 1.7e9 + 7200),)),
    ModelRecord("2", 1.7e9 + 3600, 5.5, 4.0, "lost <by> 1", "cpu", noise=3.0, replay_noise=2.0),
    ModelRecord("3", 1.7e9 + 7200, None, None, "", "cpu", ((1.7e9 + 7200, None),)),
]


def test_versions_stand_with_their_errors_and_when_they_were_champion():
    last, second, first = model_version_rows(RECORDS)
    assert len(last) == len(VERSION_HEADERS)
    assert first[:7] == (
        "1",
        "2023-11-14 22:13:20 UTC",
        "6.00",
        "-",
        "-",
        "-",
        "2023-11-14 22:13:20 UTC to 2023-11-15 00:13:20 UTC",
    )
    assert second[3:8] == ("3.00", "4.00", "2.00", "never", "lost <by> 1")
    assert last[2] == "-" and last[6].endswith(" to now") and last[7] == "-"


def test_the_plot_has_what_is_known_and_shades_champions():
    [axes] = model_errors_figure(RECORDS).axes
    held, noise, replayed, replay_noise = axes.lines
    assert list(noise.get_ydata()) == [3.0] and list(replay_noise.get_ydata()) == [2.0]
    assert list(held.get_ydata()) == [6.0, 5.5] and list(replayed.get_ydata()) == [4.0]
    assert len(axes.patches) == 2


def test_the_page_escapes_loads_nothing_and_may_be_of_none():
    made = model_versions_page("a <model>", RECORDS)
    assert "a &lt;model&gt;" in made and "lost &lt;by&gt; 1" in made and "default-src 'none'" in made
    assert model_versions_page("a <model>", RECORDS) == made
    assert "<tbody></tbody>" in model_versions_page("none", [])


def test_a_champion_that_errs_more_than_usual_is_said_first_and_data_tells_versions_apart():
    made = model_versions_page(
        "x",
        [ModelRecord("4", 1.7e9, 5.0, None, "", "cpu", (), "0123456789abcdef")],
        ["Exchanges err by <48%>"],
    )
    assert made.index("Exchanges err by &lt;48%&gt;.") < made.index("Each version was judged")
    assert "<td>01234567</td>" in made and "<td>unknown</td>" in model_versions_page("x", RECORDS)
