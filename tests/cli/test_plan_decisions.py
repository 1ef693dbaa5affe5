"""plan with several decisions before its search: what it writes and says, and what it refuses."""

import json
from dataclasses import replace

import pytest
from offers import BOX, write_offers

from shardcore.cli import main
from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.links import make_links
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Table
from shardcore.io import files
from shardcore.io.files import read_grouped_plan
from shardcore.search.decisions.towers import with_towers_of_plan
from shardcore.step.lower import lower

MIB = 1 << 20


def stored(problem, folder, model, *options) -> list[str]:
    """Arguments that plan the problem. options: may be several in a text, and name files in the folder."""
    files.write_problem(folder / "p.json", problem)
    given = f"plan {folder / 'p.json'} --model {model} --budget-evals 200 --out {folder / 'plan.json'}"
    return [*given.split(), *(word for text in options for word in text.format(folder).split())]


@pytest.fixture
def large(problem):
    """Three tables on two devices, which hold only two of them. The host has 1 GiB."""
    tables = tuple(Table(f"t{i}", 50_000, 64, 5.0, Zipf(0.6 + 0.2 * i)) for i in range(3))
    return replace(
        problem,
        tables=tables,
        topology=Topology((Device(15 * MIB),) * 2, memory=(Memory("host", 1 << 30, 25.0),)),
    )


def test_groups_and_memory_tiers_are_decided_together(large, model, tmp_path, capsys, short_explanations):
    tiered = tmp_path / "tiered.json"
    asked = stored(large, tmp_path, model, "--groups", "1", "--tiers", "--out-problem", str(tiered))
    assert main(asked) == 0
    output = capsys.readouterr().out
    assert "memory tiers" in output and "2 groups of 1 device, synchronised every step: " in output
    whole = files.read_problem(tiered)
    grouped = read_grouped_plan(tmp_path / "plan.json", whole)
    assert any(table.in_host_memory for table in whole.tables) and whole.topology == large.topology
    assert grouped.problem.topology.memory_of("host").bytes == 1 << 29  # two groups share the host
    lower(grouped.plan, grouped.problem)
    price = ["price", str(tmp_path / "plan.json"), "--problem", str(tiered), "--model", str(model)]
    assert main([*price, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["total_ms"]
    assert f"{found:.3f} ms predicted" in output
    assert main([*price, "--explain"]) == 0
    output = capsys.readouterr().out
    assert output.index("memory tiers") < output.index("The plan of one group:")


def test_hot_rows_and_towers_are_decided_together(problem, model, tmp_path, capsys):
    tables = tuple(
        replace(t, sequence=True, access=Zipf(1.3), collection="ec") if i < 3 else t
        for i, t in enumerate(problem.tables)
    )
    devices = tuple(replace(d, host=f"host-{i // 2}") for i, d in enumerate(problem.topology.devices))
    links = Topology(devices, links=make_links(within_host=0.2, between_hosts=0.1, latency_ms=0.01))
    towers = {"schema": "shardcore/towers", "version": 1, "compression_ratio": 4, "towers": [["t0", "t5"]]}
    (tmp_path / "towers.json").write_text(json.dumps(towers))
    hot = tmp_path / "hot.json"
    asked = stored(
        replace(problem, tables=tables, topology=links),
        tmp_path,
        model,
        "--hot-rows --towers {0}/towers.json --out-problem {0}/hot.json",
    )
    assert main(asked) == 0
    output = capsys.readouterr().out
    assert "their lookups" in output and "hosts found" in output
    whole = files.read_problem(hot)
    plan = files.read_plan(tmp_path / "plan.json", whole)
    assert any(table.name.endswith("_hot") for table in whole.tables) and whole.job.tower_ratio is None
    lower(plan, with_towers_of_plan(plan, whole))


def test_a_plan_is_gone_on_from_with_rows_in_host_memory(large, model, tmp_path, capsys):
    roomy = replace(large, topology=replace(large.topology, devices=(Device(1 << 30),) * 2))
    files.write_problem(tmp_path / "roomy.json", roomy)
    old = tmp_path / "old.json"
    given = f"plan {tmp_path / 'roomy.json'} --model {model} --algorithm size_greedy --out {old}"
    assert main(given.split()) == 0
    more = "--tiers --out-problem {0}/t.json --start {0}/old.json --start-problem {0}/roomy.json"
    assert main(stored(large, tmp_path, model, more, "--max-moved-tables 0")) == 0
    output = capsys.readouterr().out
    assert f"starting from {old}; " in output and "plan to start from" in output
    now = files.read_plan(tmp_path / "plan.json", files.read_problem(tmp_path / "t.json"))
    moved, was = now.provenance["moved"], files.read_plan(old, roomy)
    assert moved["chosen"]["bytes"] == 0
    stay = [
        {
            p.shard.table.name: p.devices
            for p in plan.placements
            if p.shard.table.name not in moved["forced"]["tables"]
        }
        for plan in (was, now)
    ]
    assert stay[0] == stay[1] and stay[0]


def test_a_plan_without_memory_of_hosts_is_gone_on_from_where_an_option_gives_it(
    problem, model, tmp_path, capsys
):
    asked = stored(problem, tmp_path, model)
    assert main(asked) == 0
    old, new = tmp_path / "plan.json", tmp_path / "new.json"
    tiers = ["--tiers", "--host-gib", "1", "--out-problem", str(tmp_path / "t.json")]
    assert main([*asked[:-1], str(new), "--start", str(old), "--max-moved-tables", "0", *tiers]) == 0
    assert f"starting from {old}; nothing moves" in capsys.readouterr().out
    now = files.read_problem(tmp_path / "t.json")
    assert now.topology.memory_of("host").bytes == 1 << 30
    assert files.read_plan(new, now).placements == files.read_plan(old, problem).placements


def test_a_cluster_is_chosen_with_groups(problem, model, tmp_path, capsys):
    (tmp_path / "model").symlink_to(model)
    write_offers(tmp_path / "offers.json", BOX)
    files.write_problem(tmp_path / "p.json", problem)
    own = tmp_path / "own.json"
    given = "plan {0}/p.json --offers {0}/offers.json --step-ms 1e6 --groups 2 --algorithm size_greedy"
    assert main(f"{given} --out {{0}}/plan.json --out-problem {own}".format(tmp_path).split()) == 0
    output = capsys.readouterr().out
    assert "1 x 'box': cheapest with step_ms 1e+06" in output and "all 2 devices as one group" in output
    assert files.read_plan(tmp_path / "plan.json", files.read_problem(own)).provenance["model_digest"]


@pytest.mark.parametrize(
    "options, says",
    [
        (["--tiers"], "needs --out-problem, the problem with the load factors that it is a plan of"),
        (["--hot-rows"], "needs --out-problem, the problem with the hot rows as tables that it is a plan of"),
        (["--host-gib", "4"], "--host-gib 4.0 needs --tiers, of which it is the memory"),
        (["--max-moved-tables", "0"], "--max-moved-tables 0 needs --start, the plan to start from"),
        (["--clusters", "all"], "--clusters all needs --offers, of which a cluster is chosen"),
        (["--step-ms", "4"], "--step-ms 4.0 needs --offers, of which a cluster is chosen"),
        (["--hot-rows", "--out-problem", "hot.json"], "has no sequence tables that are looked up"),
        (["--groups", "3"], "--groups is '3'; it needs 'auto' or a size"),
    ],
)
def test_an_option_that_lacks_another_is_one_line(large, model, tmp_path, monkeypatch, capsys, options, says):
    monkeypatch.chdir(tmp_path)
    assert main(stored(large, tmp_path, model, *options)) == 1
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not (tmp_path / "plan.json").exists() and not (tmp_path / "hot.json").exists()


def test_a_model_or_offers_are_needed(large, model, tmp_path, capsys):
    asked = [x for x in stored(large, tmp_path, model) if x not in ("--model", str(model))]
    with pytest.raises(SystemExit) as error:
        main(asked)
    assert error.value.code == 2 and "--offers --model --hardware is required" in capsys.readouterr().err


def test_rows_over_pods_are_chosen_by_default_and_the_job_is_told_what_it_needs(
    problem, model, tmp_path, capsys
):
    """The plan is one of the problem as it is. A topology that says its domains is not asked."""
    devices = tuple(Device(1 << 30, host=f"p{d // 4}/h{d // 2}") for d in range(8))
    links = make_links(0.01, within_host=40.0, within_pod=40.0, between_hosts=2.0)
    tables = tuple(
        replace(problem.tables[0], name=f"t{i}", rows=40_000, dim=64, pooling=20.0) for i in range(2)
    )
    kinds = Constraints(kinds=tuple((t.name, ("host_row", "pod_row")) for t in tables))
    of = replace(problem, tables=tables, topology=Topology(devices, links=links), constraints=kinds)
    asked = [*stored(of, tmp_path, model), "--algorithm", "anneal", "--budget-evals", "200"]
    assert main(asked) == 0
    said, plan = capsys.readouterr().out, files.read_plan(tmp_path / "plan.json", of)
    domain, other = ("pod", "host") if plan.placements[0].kind == "pod_row" else ("host", "pod")
    assert f"rows over {domain}s of" in said and "(best)" in said and "row domains" in said
    assert ("over pods of 2 hosts: the job needs TORCHREC_RESOLVED_POD_SIZE=2" in said) == (domain == "pod")
    assert plan.provenance["decisions"]["chosen"].startswith(f"rows over {domain}s of")
    lower(plan, of)
    decided = replace(of, topology=replace(of.topology, rows_over=other))
    assert main([*stored(decided, tmp_path, model), "--algorithm", "anneal", "--budget-evals", "200"]) == 0
    said, plan = capsys.readouterr().out, files.read_plan(tmp_path / "plan.json", decided)
    assert "row domains" not in said and {p.kind for p in plan.placements} == {f"{other}_row"}
