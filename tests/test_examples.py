"""The notebook of examples/ runs, and shows what it promises."""

import json
import re
from pathlib import Path

import pytest

from docs.tools.notebook import executed, markdown

NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples/first_plan.ipynb").read_text())


def outputs(notebook):
    return [output for cell in notebook["cells"] for output in cell.get("outputs", ())]


def kinds(notebook):
    return [sorted(output.get("data", {"stdout": ""})) for output in outputs(notebook)]


@pytest.mark.long
def test_the_first_plan_runs_and_its_stored_outputs_are_of_this_code():
    made = executed(NOTEBOOK)
    assert kinds(made) == kinds(NOTEBOOK)
    printed = ["".join(output["text"]) for output in outputs(made) if "text" in output]
    compared, what_if = printed
    # A library that other tests have set up may log between the lines.
    ms = {name: float(value) for name, value in re.findall(r"^(\w+) +([\d.]+) ms ", compared, re.MULTILINE)}
    assert {"portfolio", "neuroshard", "size_greedy", "random"} <= set(ms)
    assert ms["portfolio"] == min(ms.values()) < ms["size_greedy"]
    assert what_if.count("million samples a second") == 8
    assert "2 devices of 24 GiB: no plan: " in what_if


def cell(source):
    return {"cell_type": "code", "source": [source]}


def test_a_cell_shows_what_it_prints_and_the_value_of_its_last_line():
    source = [
        cell("x = 1\nprint('said')\nx + 1"),
        {"cell_type": "markdown", "source": ["# A title"]},
        cell("y = x"),
    ]
    made = executed({"cells": source})
    printed, value = outputs(made)
    assert printed["text"] == ["said\n"]
    assert value["data"] == {"text/plain": ["2"]}
    assert markdown(made).split("\n\n")[1:4] == ["```text\nsaid\n```", "```text\n2\n```", "# A title"]


def test_the_error_of_a_cell_is_raised():
    with pytest.raises(ZeroDivisionError):
        executed({"cells": [cell("1 / 0")]})
