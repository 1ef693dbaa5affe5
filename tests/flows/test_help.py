"""Every flow explains itself, and runs nothing then."""

import runpy
import sys
from unittest import mock

import pytest

from flows.refresh import parse_override
from shardcore.core.errors import ShardCoreError
from tasks import services


@pytest.mark.parametrize(
    "flow",
    [
        "tables",
        "measure",
        "train",
        "train_policy",
        "evaluate",
        "promote",
        "publish",
        "refresh",
        "topology",
        "job",
    ],
)
@pytest.mark.parametrize("word, code", [("-h", 0), ("--bogus", 2)])
@pytest.mark.filterwarnings("ignore")  # Prefect's, of a flow that is defined twice in a process
def test_a_flow_says_what_it_does_or_what_it_does_not_know(flow, word, code, capsys):
    with (
        mock.patch.object(sys, "argv", [flow, word]),
        pytest.raises(SystemExit) as ended,
        mock.patch.object(services, "run_flow", side_effect=ShardCoreError("the flow ran")),
    ):
        runpy.run_module(f"flows.{flow}", run_name="__main__")
    output = capsys.readouterr()
    assert ended.value.code == code
    assert f"usage: python -m flows.{flow}" in output.out + output.err


def test_a_parameter_is_set_by_section_key_and_value():
    assert parse_override("measure.compute_samples=1000") == {"measure": {"compute_samples": 1000}}
    assert parse_override("publish.plans=s3://a/b=c") == {"publish": {"plans": "s3://a/b=c"}}
    with pytest.raises(ShardCoreError, match="--set 'measure=1' needs the form SECTION.KEY=VALUE"):
        parse_override("measure=1")
    with pytest.raises(ShardCoreError, match=r"--set 'measure.chunk=\[' has a value that is not YAML"):
        parse_override("measure.chunk=[")
