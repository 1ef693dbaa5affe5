"""The Setting (hardware, batch, precision, optimizer) of all pipeline stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import OPTIMIZERS, PRECISION_BYTES, Setting
from shardcore.core.validation import MOST_BATCH, Record, describe_differences, number_within, one_of
from shardcore.io import dataset

AUTO = "auto"
"""Hardware of a config: that of the device at hand."""


@dataclass(frozen=True)
class SettingConfig(Record, noun="setting"):
    """The Setting to measure in.

    hardware: name of the device; auto: the device at hand
    batch: global batch; 65536 is usual on GPUs
    precision: precision of the weights
    optimizer: optimizer of the embeddings; docs/measure.md says which run where
    """

    hardware: str = AUTO
    batch: Annotated[int, number_within(1, MOST_BATCH)] = 2048
    precision: Annotated[str, one_of(PRECISION_BYTES)] = "fp32"
    optimizer: Annotated[str, one_of(OPTIMIZERS)] = "exact_sgd"

    def setting(self, at_hand: Callable[[], str] | None = None) -> Setting:
        """Setting of this config. at_hand: names the device for hardware "auto"; default: this machine's device."""
        name = (at_hand or _local_hardware)() if self.hardware == AUTO else self.hardware
        return Setting(name, self.batch, self.precision, self.optimizer)

    def dataset_or_local_setting(self, folder: Path) -> Setting:
        """Setting of the dataset in a folder. Without a dataset, the setting of this machine's device."""
        return self.dataset_setting(folder) if dataset.dataset_settings(folder) else self.setting()

    def dataset_setting(self, folder: Path) -> Setting:
        """Setting of a dataset that matches this config. Raises ShardCoreError if no setting matches.

        With hardware "auto", a single match may also be of another device.
        """
        settings = dataset.dataset_settings(folder)
        matching = [
            s
            for s in settings
            if self.hardware in (AUTO, s.hardware)
            and dataclasses.replace(s, hardware=self.hardware) == Setting(**vars(self))
        ]
        if len(matching) == 1:
            return matching[0]
        # If several devices were measured, the one at hand is meant.
        if (local := self.setting()) in matching:
            return local
        raise ShardCoreError(
            f"{folder} holds samples of other settings than `setting` in params.yaml asks for: "
            f"{'; '.join(describe_differences(held, local) for held in settings) or 'none'}; "
            "run the measure stage, or change `setting`"
        )


def _local_hardware() -> str:
    from shardcore.measure import hardware  # imports torch

    return hardware.hardware_name(hardware.detect_device())
