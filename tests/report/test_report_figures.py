"""Texts of figures: names as they are, powers of ten as matplotlib writes them."""

import re

import pytest
from matplotlib.figure import Figure

from shardcore.report import figures


@pytest.mark.parametrize(
    "name", ["A$_$", "$", "$$", r"a$\mathdefault{x}$b", r"$\frac{1}$", "100 $ to 200 $", r"\$_\$"]
)
def test_a_name_is_plain_text_wherever_it_stands(name):
    made = Figure()
    axes = made.subplots()
    axes.plot([1, 2], label=f"label {name}")
    axes.set(title=f"title {name}", xlabel=f"axis {name}")
    axes.set_xticks([0, 1], ["left", f"tick {name}"])
    axes.annotate(f"note {name}", (0, 1))
    axes.legend()
    texts = re.findall(r"<text[^>]*>(.*?)</text>", figures.svg_text(made))
    assert {f"{what} {name}" for what in ("label", "title", "axis", "tick", "note")} <= set(texts)
    assert figures.png_bytes(made).startswith(b"\x89PNG")


def test_powers_of_ten_stay_powers():
    made = Figure()
    axes = made.subplots()
    axes.plot([1, 10_000], [1, 10_000])
    axes.set(xscale="log", yscale="log")
    drawn = re.sub(r"<!--.*?-->", "", figures.svg_text(made))
    assert "mathdefault" not in drawn and "<tspan" in drawn
