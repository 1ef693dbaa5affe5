"""The choice of the setting of all stages."""

import dataclasses
from pathlib import Path

import pytest
from laws import SETTING, compute_samples, linear_law, pool

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.io import dataset
from shardcore.measure import hardware
from tasks.setting import SettingConfig

HERE = Setting(hardware.hardware_name(hardware.detect_device()), SETTING.batch)
OTHER = dataclasses.replace(SETTING, batch=64)


def measured(folder, *settings):
    for setting in settings:
        dataset.write_compute_samples(
            folder, compute_samples(linear_law, 3, setting), dataset.write_pool(folder, pool())
        )
    return folder


def test_auto_is_this_machine_and_where_it_was_not_measured_the_only_one_that_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    auto = SettingConfig(batch=SETTING.batch)
    assert auto.setting() == auto.dataset_or_local_setting(tmp_path / "nothing") == HERE
    assert auto.dataset_setting(measured(tmp_path / "elsewhere", SETTING, OTHER)) == SETTING
    assert auto.dataset_setting(measured(tmp_path / "both", SETTING, HERE)) == HERE
    two = measured(Path("two"), SETTING, dataclasses.replace(SETTING, hardware="law-2"))
    with pytest.raises(
        ShardCoreError,
        match=r"two holds samples of other settings than .*: hardware: law against [^;,]*; hardware: law-2 against ",
    ):
        auto.dataset_setting(two)


def test_what_is_named_is_what_is_taken(tmp_path):
    folder = measured(tmp_path, SETTING, OTHER)
    for setting in (SETTING, OTHER):
        assert SettingConfig(SETTING.hardware, setting.batch).dataset_setting(folder) == setting
    for wrong, said in (
        (
            {"hardware": "another"},
            "hardware: law against another; hardware: law against another, batch: 64 against 256",
        ),
        ({"batch": 128}, "batch: 256 against 128; batch: 64 against 128"),
        (
            {"precision": "fp16"},
            "precision: fp32 against fp16; batch: 64 against 256, precision: fp32 against fp16",
        ),
        (
            {"optimizer": "rowwise_adagrad"},
            "optimizer: exact_sgd against rowwise_adagrad; batch: 64 against 256, ",
        ),
    ):
        with pytest.raises(ShardCoreError, match=f"`setting` in params.yaml asks for: {said}"):
            SettingConfig(**{"hardware": SETTING.hardware, "batch": SETTING.batch, **wrong}).dataset_setting(
                folder
            )
    assert SettingConfig("named", 8, "fp16", "rowwise_adagrad").setting() == Setting(
        "named", 8, "fp16", "rowwise_adagrad"
    )
