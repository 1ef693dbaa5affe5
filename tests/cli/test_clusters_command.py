"""plan --offers: the files of all clusters, and what it says."""

import json
import re
import sys

from offers import BOX, write_offers

from shardcore.cli import main
from shardcore.io import files


def asked(folder, model, problem, *target):
    files.write_problem(folder / "problem.json", problem)
    (folder / "model").symlink_to(model)  # named in the offer, relative to its file
    poor = {"name": "poor", "memory_bytes": 1000, "price_per_hour": 1.0}
    write_offers(folder / "offers.json", BOX, BOX | poor)
    given = (
        "plan {0}/problem.json --offers {0}/offers.json --clusters {0}/out --out {0}/out/plan.json "
        "--out-problem {0}/out/problem.json"
    )
    limited = any(option.startswith("--budget") for option in target)
    return main([*given.format(folder).split(), *([] if limited else ["--budget-evals", "500"]), *target])


def test_it_writes_the_cheapest_clusters_plan_and_all_that_it_searched(problem, model, tmp_path, capsys):
    assert asked(tmp_path, model, problem, "--step-ms", "1e6") == 0
    out, err = capsys.readouterr()
    assert "1 x 'box', 3.00 an hour" in out and "2 clusters have no plan, such as 1 x 'poor': " in out
    assert "extrapolated: the topology gives" in err
    made = files.read_problem(tmp_path / "out/problem.json")
    plan = files.read_plan(tmp_path / "out/plan.json", made)
    assert len(made.topology) == 2 and made.tables == problem.tables and plan.placements
    found = json.loads((tmp_path / "out/clusters.json").read_text())
    assert [(c["offer"], c["hosts"]) for c in found] == [("box", 1), ("box", 2), ("poor", 1), ("poor", 2)]
    assert found[0]["step_ms"] > 0 and "why" in found[2]
    assert (tmp_path / "out/curve.png").read_bytes().startswith(b"\x89PNG")


def test_out_of_time_each_cluster_still_has_a_plan(problem, model, tmp_path, monkeypatch):
    monkeypatch.setitem(BOX, "most_hosts", 8)
    assert asked(tmp_path, model, problem, "--step-ms", "1e6", "--budget-s", "1e-6") == 0
    found = json.loads((tmp_path / "out/clusters.json").read_text())
    # Of 1 to 8 hosts four divide the batch. The poor offer has no room.
    assert ["step_ms" in c for c in found] == [True] * 4 + [False] * 4


def test_an_offer_whose_name_looks_like_a_formula_is_drawn_as_it_is(problem, model, tmp_path, monkeypatch):
    """matplotlib takes what is between two dollars for a formula."""
    monkeypatch.setitem(BOX, "name", r"A$_$ \frac{ $^$")
    assert asked(tmp_path, model, problem, "--step-ms", "1e6") == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "problem.json",
        "plan.json",
        "clusters.json",
        "curve.png",
    }


def test_a_learned_algorithm_is_refused_in_one_line(problem, model, tmp_path, capsys):
    assert asked(tmp_path, model, problem, "--step-ms", "1", "--algorithm", "dreamshard") == 1
    assert "error: algorithm 'dreamshard' needs a policy" in capsys.readouterr().err


def test_a_target_out_of_reach_is_one_line_and_keeps_what_was_searched(problem, model, tmp_path, capsys):
    assert asked(tmp_path, model, problem, "--step-ms", "1e-9") == 1
    out, err = capsys.readouterr()
    assert "error: no cluster of 4 reaches step_ms 1e-09; the nearest, " in err
    found = json.loads((tmp_path / "out/clusters.json").read_text())
    for cluster in found:
        price = rf"{cluster['price_per_hour']:.3f}"
        cost = (
            f"{cluster['samples_per_s']:,.3f} +{cluster['step_ms']:.3f}" if "step_ms" in cluster else "- +-"
        )
        assert re.search(rf"^{cluster['hosts']} x '{cluster['offer']}' +{price} +{cost} ", out, re.MULTILINE)
    assert len(json.loads((tmp_path / "out/clusters.json").read_text())) == 4
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"clusters.json", "curve.png"}


def test_without_matplotlib_only_the_picture_is_missing(problem, model, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] or ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert asked(tmp_path, model, problem, "--step-ms", "1e6") == 0
    out, _ = capsys.readouterr()
    said = out.splitlines()[-1]
    assert said.startswith(
        f"{tmp_path}/out/curve.png was not drawn: this needs matplotlib, which is not installed ("
    )
    assert said.endswith("): pip install 'shardcore[report]'")
    assert "1 x 'box', 3.00 an hour" in out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"problem.json", "plan.json", "clusters.json"}


def test_a_plan_whose_decision_has_no_answer_shows_what_was_searched(problem, model, tmp_path, capsys):
    files.write_problem(tmp_path / "problem.json", problem)
    (tmp_path / "model").symlink_to(model)
    write_offers(tmp_path / "offers.json", BOX)
    given = "plan {0}/problem.json --offers {0}/offers.json --step-ms 1e-9 --algorithm size_greedy"
    assert main(f"{given} --out {{0}}/p.json --out-problem {{0}}/q.json".format(tmp_path).split()) == 1
    out, err = capsys.readouterr()
    assert "\n1 x 'box' " in out and "\n2 x 'box' " in out and "error: no cluster of 2 reaches" in err


def test_clusters_that_a_profile_cannot_rank_are_named(tmp_path, monkeypatch, capsys):
    """By a profile, steps have a band. A cheaper cluster that may be fast enough within it is not ranked."""
    monkeypatch.chdir(tmp_path)
    made = "problem mlperf-dlrm-dcnv2 --hardware nvidia-h100-sxm --devices 8 --batch 65536 --out problem.json"
    assert main(made.split()) == 0
    box = {"devices": 8, "memory_bytes": 80 * 10**9, "hardware": "nvidia-h100-sxm", "most_hosts": 1}
    cheap, dear = (
        {"name": "cheap", "price_per_hour": 20.0, **box},
        {"name": "dear", "price_per_hour": 32.0, **box},
    )
    write_offers(tmp_path / "offers.json", cheap | {"speed": 0.97}, dear)
    given = "plan problem.json --offers offers.json --budget-evals 500 --out plan.json --out-problem x.json --step-ms"
    # Both meet this target surely, so the cheaper one is chosen, and none is in doubt.
    assert main([*given.split(), "100"]) == 0
    out = capsys.readouterr().out
    assert "1 x 'cheap', 20.00 an hour" in out and " ±" in out and "within the errors" not in out
    slow, fast = (
        float(ms) for ms in re.findall(r"^1 x '.*?: ([\d.]+) ms$", out_of(capsys, given, "100"), re.M)
    )
    # Between the two steps only the dear one is predicted to be fast enough, by 1%.
    assert main([*given.split(), f"{(slow + fast) / 2:.6f}"]) == 0
    out = capsys.readouterr().out
    assert "1 x 'dear', 32.00 an hour" in out
    assert (
        "within the errors of their profiles these may be better, too: 1 x 'cheap'. To rank them, measure: "
        in out
    )


def out_of(capsys, command, *more):
    """What a command prints, on both streams."""
    assert main([*command.split(), *more]) == 0
    return "".join(capsys.readouterr())
