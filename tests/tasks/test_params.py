"""Each number of params.yaml has ends: a slip is one line at once, not days of drawing or a clock that
overflows."""

import dataclasses
import math
import re
from typing import get_args

import pytest

from docs.tools import params as params_file
from flows.tables import TablesConfig
from flows.train import TrainConfig
from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import type_hints
from shardcore.io.schema import MOST_INT
from shardcore.stages.evaluate import EvaluateConfig
from shardcore.stages.measure_config import MeasureConfig
from tasks import params
from tasks.promote import PromoteConfig
from tasks.publish import PublishConfig
from tasks.setting import SettingConfig
from tasks.stack_config import StackConfig

CONFIGS = (
    SettingConfig,
    TablesConfig,
    MeasureConfig,
    TrainConfig,
    EvaluateConfig,
    PromoteConfig,
    PublishConfig,
    StackConfig,
)
ELSEWHERE = {"object_store_mib"}
"""This machine's memory is its end (test_stack.py)."""
NUMBERS = [
    (config, field.name)
    for config in CONFIGS
    for field in dataclasses.fields(config)
    if {int, float} & {*get_args(kind := type_hints(config)[field.name]), kind}
    and field.name not in ELSEWHERE
]


def make(config, **values):
    made = config(**values)
    if config is SettingConfig:
        made.setting()


@pytest.mark.parametrize("config, name", NUMBERS)
def test_numbers_have_ends(config, name):
    for value in (MOST_INT + 1, 10**18, -1, math.nan):
        shown = "|".join(
            re.escape(str(x)) for x in (value, float(value))
        )  # a record may have made it a float
        with pytest.raises(ShardCoreError, match=rf"{name} (is )?({shown})") as refused:
            make(config, **{name: value})
        assert len(str(refused.value)) <= 300


def test_there_are_numbers():
    assert len(NUMBERS) > 40


def test_parameters_name_an_unknown_key(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("measure:\n  compute_sample: 3\n")
    with pytest.raises(ShardCoreError, match="section 'measure' has an unknown key 'compute_sample'"):
        params.read_section("measure", MeasureConfig, path)
    path.write_text("measure:\n  compute_samples: lots\n")
    with pytest.raises(ShardCoreError, match="compute_samples is 'lots'"):
        params.read_section("measure", MeasureConfig, path)
    path.write_text("mesure:\n  compute_samples: 3\n")
    with pytest.raises(ShardCoreError, match="unknown section 'mesure'; known are setting, tables"):
        params.read_section("measure", MeasureConfig, path)
    path.write_text("measure: [\n")
    with pytest.raises(ShardCoreError, match="not YAML"):
        params.read_section("measure", MeasureConfig, path)


def test_a_section_that_an_older_file_lacks_is_named_with_the_line_to_write(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("tables: {}\n")
    with pytest.raises(
        ShardCoreError, match="has no section 'train_policy', .* add the line `train_policy: {}`"
    ):
        params.require_section("train_policy", path)
    path.write_text("tables: {}\ntrain_policy: {}\n")
    params.require_section("train_policy", path)
    assert params.read_section("train_policy", TrainConfig, path) == TrainConfig()


def test_comments_of_the_file_are_as_declared():
    """`python -m docs.tools.params` writes them."""
    text = params_file.PARAMS.read_text()
    assert params_file.commented(text) == text


def test_a_key_is_shown_with_the_words_that_it_knows_and_the_default_that_it_replaces():
    text = "# Head.\n\nsetting:\n  precision: fp16\n  batch: 2048 # stale\nmeasure:\n  kernels:\n    max_repeats: 6\n"
    assert params_file.commented(text) == (
        "# Head.\n\nsetting: # The Setting to measure in\n"
        "  precision: fp16 # precision of the weights; one of fp32, fp16, bf16; default: fp32\n"
        "  batch: 2048 # global batch; 65536 is usual on GPUs\n"
        "measure: # Samples to measure, and the devices to use\n"
        "  kernels: # how ops run. Its arena also limits shards of groups and of steps\n"
        "    max_repeats: 6 # most repeats of an op; three times as many where it is held out to judge models; "
        "default: 24\n"
    )
    with pytest.raises(ShardCoreError, match="params.yaml has a key 'steps' that no config has"):
        params_file.commented("#\n\nmeasure:\n  kernels:\n    steps: 6\n")
