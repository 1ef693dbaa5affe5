"""Exchanges over emulated hosts: which are drawn, and that a dataset gets those that it lacks."""

from collections import Counter

import pytest
from boxes import boxed

from bench import box
from bench.box import emulated_request
from bench.hosts import Box
from shardcore.io import dataset
from shardcore.io.measurements import EmulatedLinks
from shardcore.measure.sampling.collectives import draw_collective_request
from shardcore.step.collectives import COLLECTIVES


def test_exchanges_over_emulated_hosts_are_of_all_groups():
    links = EmulatedLinks(0.4)
    requests = [emulated_request(i, (4, 2), 256, links) for i in range(200)]
    kinds = Counter((r.collective, r.group) for r in requests)
    assert set(kinds) == {
        ("all_to_all", "world"),
        ("all_to_all", "cross"),
        ("reduce_scatter", "world"),
        ("reduce_scatter", "host"),
        ("all_reduce", "world"),
        *((c, "world") for c, row in COLLECTIVES.items() if row.ids),
    }
    assert min(kinds.values()) >= 8
    assert {(r.hosts, r.emulated, r.busy_ms, len(r.widths)) for r in requests} == {(4, links, 0.0, 8)}
    # rows that reduce-scatters within hosts of two left
    assert {r.batch for r in requests if r.group == "cross"} <= {128, 64, 32, 16}
    assert {emulated_request(i, (8, 1), 256, links).group for i in range(50)} == {"world"}
    even = Counter(r.collective for r in requests if len(set(r.widths)) == 1)
    assert even["all_to_all"] >= 10 and even["all_to_all_ids"] >= 3
    plain = draw_collective_request(3, 8, 256, hosts=4)
    assert (requests[3].widths, requests[3].start_ms) == (plain.widths, plain.start_ms)


@boxed
@pytest.mark.long  # tests/bench/test_hosts.py has gangs in boxes
def test_exchanges_over_emulated_hosts_are_measured_once_and_say_so(tmp_path, monkeypatch, capsys):
    asked = ["box", "measure", str(tmp_path), "--exchanges", "3", "--batch", "64", "--between-gbit-s", "1"]
    monkeypatch.setattr("sys.argv", asked)
    box.main()
    among = "exchanges measured among 4 ranks of 2 emulated hosts, between 1 Gbit/s\n"
    assert capsys.readouterr().out == f"3 of 3 {among}"
    found, links = dataset.read_collective_samples(tmp_path), Box(between_gbit_s=1.0).links
    assert {s.request for s in found} == {emulated_request(i, (2, 2), 64, links) for i in range(3)}
    assert all(s.error is None for s in found)
    box.main()
    assert capsys.readouterr().out == f"0 of 3 {among}"
