"""The device has one name everywhere, and an FBGEMM that does not work is one clear line."""

import sys

import pytest
import torch

from shardcore.core.errors import ShardCoreError
from shardcore.measure import devices, hardware


@pytest.mark.parametrize(
    "model, name",
    [
        ("AMD EPYC 9654 96-Core Processor", "cpu-amd-epyc-9654"),
        ("Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz", "cpu-intel-xeon-platinum-8370c"),
    ],
)
def test_a_cpu_is_named_after_its_model(model, name, tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel\t\t: 17\nmodel name\t: {model}\nstepping\t: 1\n")
    monkeypatch.setattr(devices, "Path", lambda path: {"/proc/cpuinfo": info}[path])
    assert hardware.hardware_name("cpu") == name
    info.unlink()
    assert hardware.hardware_name("cpu") == "cpu-unknown"


@pytest.mark.parametrize(
    "broken, message",
    [
        (
            "raise ImportError('libfbgemm.so: undefined symbol')",
            r"FBGEMM is not installed: .*pip install .*undefined symbol",
        ),
        (
            "raise OSError('libtorch.so: cannot open shared object file')",
            "FBGEMM does not match torch .*cannot open shared",
        ),
    ],
)
def test_an_fbgemm_that_cannot_be_imported_is_one_clear_line(broken, message, tmp_path, monkeypatch):
    (tmp_path / "fbgemm_gpu").mkdir()
    (tmp_path / "fbgemm_gpu/__init__.py").write_text(broken)
    for name in [n for n in sys.modules if n.split(".")[0] == "fbgemm_gpu"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ShardCoreError, match=message):
        hardware.require_fbgemm("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named():
    assert hardware.detect_device() == "cpu"
    for ask in (hardware.require_fbgemm, hardware.hardware_name):
        with pytest.raises(ShardCoreError, match="no CUDA device here.*measure on 'cpu'"):
            ask("cuda")
