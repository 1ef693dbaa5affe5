"""Hardware profiles as data: what ships, what is read and written, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.cost import profile as profiles
from shardcore.cost.profile import (
    BETWEEN_HOSTS,
    RATES,
    Network,
    Profile,
    ProfileRate,
    load_network,
    load_profile,
    network_names,
    profile_names,
    profile_of_device,
    write_profile,
)

H100 = load_profile("nvidia-h100-sxm")
NAMES = profile_names()


def test_the_cards_of_the_issue_ship():
    assert {
        "nvidia-h100-sxm",
        "nvidia-h200",
        "nvidia-a100-80",
        "nvidia-a100-40",
        "nvidia-v100",
        "nvidia-b200",
        "amd-mi300x",
        "amd-mi350",
        "cpu",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_has_each_rate_with_its_unit_and_source(name):
    profile = load_profile(name)
    assert profile.name == name and set(profile.rates) == set(RATES)
    for key, rate in profile.rates.items():
        assert rate.value > 0 and rate.unit == RATES[key][0] and rate.source, key
        # What the law leaves unexplained is never nothing.
        assert rate.uncertainty > 0 or key in profiles.SPEC, key


@pytest.mark.parametrize("name", NAMES)
def test_bandwidths_stay_below_the_data_sheet(name):
    values = load_profile(name).rate_values
    between_hosts = ((f"{name}_between_hosts", "network") for name in profiles.PROFILED_COLLECTIVES)
    for key, most in (
        ("read", "hbm"), ("update", "hbm"), ("all_to_all_within_host", "nvlink"), *between_hosts
    ):  # fmt: skip
        assert values[f"{key}_gbps"] < values[f"{most}_gbps"], key


def test_a_file_holds_all_that_a_profile_has(tmp_path):
    write_profile(tmp_path / "own.json", H100)
    assert load_profile(tmp_path / "own.json") == H100


@pytest.mark.parametrize("name", network_names())
def test_a_shipped_network_has_all_rates_between_hosts_below_its_data_sheet(name):
    network = load_network(name)
    assert network.name == name and network.words and set(BETWEEN_HOSTS) <= set(network.rates)
    for key, rate in network.rates.items():
        assert rate.source and (rate.uncertainty > 0 or key in profiles.SPEC), key
        # An all-reduce of trees sends less between hosts than the ring that its rate is of.
        if key.endswith("_between_hosts_gbps") and not key.startswith("all_reduce"):
            assert rate.value < network.rates["network_gbps"].value, key


def test_a_profile_on_a_network_has_the_rates_of_the_network_and_all_others_of_the_card(tmp_path):
    network = load_network("aws-efa-4x100g")
    write_profile(tmp_path / "efa.json", network)
    for given in ("aws-efa-4x100g", tmp_path / "efa.json"):
        found = load_profile(f"nvidia-h100-sxm@{given}")
        assert found == H100.on_network(network) and found.network == "aws-efa-4x100g"
        assert found.rates == {**H100.rates, **network.rates} and found.digest != H100.digest
    write_profile(tmp_path / "both.json", found)
    assert load_profile(tmp_path / "both.json") == found
    assert found.topology(2, 8).network == "aws-efa-4x100g" and H100.topology(2, 8).network is None


def test_a_path_with_an_at_sign_is_a_path(tmp_path):
    (tmp_path / "me@work").mkdir()
    write_profile(tmp_path / "me@work" / "own.json", H100)
    assert load_profile(tmp_path / "me@work" / "own.json") == H100


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-sxm"),
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-40"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-80"),
        ("Tesla V100-SXM2-32GB", "nvidia-v100"),
        ("NVIDIA B200", "nvidia-b200"),
        ("AMD Instinct MI300X", "amd-mi300x"),
        ("AMD Instinct MI350X", "amd-mi350"),
        ("NVIDIA GB200", "nvidia-gb200"),
        ("NVIDIA B300 SXM6 AC", "nvidia-b300"),
        ("NVIDIA H100 PCIe", "nvidia-h100-pcie"),
        ("NVIDIA H20", "nvidia-h20"),
        ("NVIDIA L40S", "nvidia-l40s"),
    ],
)
def test_a_device_is_known_by_its_name(device, name):
    assert profile_of_device(device).name == name


def _changed(**rate):
    def make():
        rates = {**H100.rates, "read_gbps": dataclasses.replace(H100.rates["read_gbps"], **rate)}
        return dataclasses.replace(H100, rates=rates)

    return make


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: load_profile("nvidia-x"), "profile 'nvidia-x' is not known; known are amd-mi300x"),
        (lambda: load_profile("absent.json"), "cannot read absent.json"),
        (lambda: load_profile("nvidia-x@slingshot-11"), "profile 'nvidia-x' is not known"),
        (lambda: load_profile("cpu@efa"), "network 'efa' is not known; known are aws-efa-32x100g"),
        (lambda: load_profile("cpu@absent.json"), "cannot read absent.json"),
        (lambda: Network("mine", "", {}), "network 'mine' has no words"),
        (
            lambda: Network("mine", "w", {"read_gbps": H100.rates["read_gbps"]}),
            r"network 'mine' has an unknown rate \['read_gbps'\]; known are nvlink_gbps, network_gbps",
        ),
        (
            lambda: Network("mine", "w", {"network_gbps": ProfileRate(1.0, 0.1, "GiB/s", "s")}),
            "network 'mine' has network_gbps in 'GiB/s'; it needs 'GB/s'",
        ),
        (
            lambda: profile_of_device("GeForce 256"),
            "device 'GeForce 256' has no profile; known are amd-mi300x",
        ),
        (_changed(value=0.0), "has value 0.0; it needs 1e-09 to 1,000,000,000,000,000"),
        (_changed(value=-1.0), "has value -1.0; it needs 1e-09 to 1,000,000,000,000,000"),
        (_changed(value=float("nan")), "has value nan; it needs 1e-09 to 1,000,000,000,000,000"),
        (_changed(uncertainty=-0.1), "a rate has uncertainty -0.1; it needs 0 to 3"),
        (_changed(unit="ms"), "has read_gbps in 'ms'; it needs 'GB/s'"),
        (_changed(source=" "), "a rate has no source"),
        (
            lambda: dataclasses.replace(H100, name="a b"),
            "profile 'a b' has name 'a b'; it needs a folder's name",
        ),
        (lambda: dataclasses.replace(H100, memory_bytes=0), "memory_bytes 0"),
        (
            lambda: dataclasses.replace(H100, rates={**H100.rates, "x": H100.rates["read_gbps"]}),
            "unknown rate",
        ),
        (lambda: Profile("few", (), 1, {"read_gbps": ProfileRate(1.0, 0.1, "GB/s", "s")}), "lacks the rate"),
    ],
)
def test_bad_profiles_are_refused_in_one_line(make, words):
    with pytest.raises(ShardCoreError, match=words.replace("(", r"\(")) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda body: body["rates"]["read_gbps"].pop("source"), "lacks the key 'source'"),
        (lambda body: body["rates"].update(read_gbps=7), "rates: 'read_gbps'"),
        (lambda body: body.update(version=9), "has version 9"),
        (lambda body: body.update(schema="shardcore/plan"), "expected 'shardcore/profile'"),
        (lambda body: body.update(cores=3), "unknown key 'cores'"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, edit, words):
    path = tmp_path / "bad.json"
    write_profile(path, H100)
    body = json.loads(path.read_text())
    edit(body)
    path.write_text(json.dumps(body))
    with pytest.raises(ShardCoreError, match=words) as error:
        load_profile(path)
    assert "bad.json" in str(error.value) and "\n" not in str(error.value)


def test_draws_follow_the_uncertainty_and_the_seed():
    one, again, other = (H100.with_sampled_rates(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert one.rates["hbm_gbps"] == H100.rates["hbm_gbps"]  # a data sheet does not err
    rng = np.random.default_rng(0)
    logs = [
        np.log(H100.with_sampled_rates(rng).rate_values["read_gbps"] / H100.rate_values["read_gbps"])
        for _ in range(400)
    ]
    assert np.std(logs) == pytest.approx(H100.rates["read_gbps"].uncertainty, rel=0.15)


def test_the_band_adds_what_rates_err_by():
    def prices(many):
        return np.array([[1 / values["read_gbps"], values["sort_lookup_ns"], 7.0] for values in many])

    read, sort = (H100.rates[name].uncertainty for name in ("read_gbps", "sort_lookup_ns"))
    assert H100.error_band(prices) == pytest.approx([read, sort, 0.0])


def test_a_topology_has_the_cards_memory_and_host_memory_at_its_rate():
    topology = H100.topology(2, 4, host_memory_bytes=1 << 40)
    assert len(topology.hosts) == 2 and len(topology) == 8 and topology.hardware == H100.name
    assert {d.memory_bytes for d in topology.devices} == {H100.memory_bytes}
    memory = topology.memory_of("host")
    assert memory and memory.gbps == H100.rate_values["host_read_gbps"]
    assert not H100.topology(1, 2).memory
