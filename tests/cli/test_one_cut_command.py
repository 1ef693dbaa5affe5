"""plan --offers --each: the files of all machines, and what it says and refuses."""

import pytest
from offers import BOX, write_offers

from shardcore.cli import main
from shardcore.core.types import Plan
from shardcore.io import files


def asked(folder, model, problem, *given, offers=(BOX, BOX | {"name": "pair", "most_hosts": 1})):
    files.write_problem(folder / "problem.json", problem)
    if not (folder / "model").exists():
        (folder / "model").symlink_to(model)  # named in the offer, relative to its file
    write_offers(folder / "offers.json", *offers)
    call = f"plan {folder}/problem.json --offers {folder}/offers.json --out {folder}/out --budget-evals 300"
    return main([*call.split(), *(given or ["--each"])])


def plans_in(folder) -> list[Plan]:
    return [
        files.read_valid_plan(path, files.read_problem(str(path).replace(".plan.", ".problem.")))
        for path in sorted(folder.glob("*.plan.json"))
    ]


def test_each_offer_has_a_plan_with_the_same_columns_and_says_what_it_loses(problem, model, tmp_path, capsys):
    reserve = {"name": "reserve", "most_hosts": 1, "reserved_bytes": 1 << 20}
    poor = {"name": "poor", "memory_bytes": 1000}
    assert asked(tmp_path, model, problem, offers=(BOX, BOX | reserve, BOX | poor)) == 0
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "offer" and "regret" in header and "why no plan" in header
    box, kept, none = lines
    assert box.split()[:2] == ["box", "4"] and box.split()[4].endswith("%")
    assert "1.0 MiB" in kept and none.split()[:5] == ["poor", "4", "-", "-", "-"] and "does not fit" in none
    one, other = plans_in(tmp_path / "out")
    ranges = [
        {(p.shard.table.name, p.shard.col_lo, p.shard.col_hi) for p in x.placements} for x in (one, other)
    ]
    assert ranges[0] == ranges[1] and one.provenance["model_digest"]


def test_offers_whose_names_differ_in_what_files_lack_have_files_of_their_own(problem, model, tmp_path):
    offers = [BOX | {"name": name, "most_hosts": 1} for name in ("a b", "a/b")]
    assert asked(tmp_path, model, problem, "--each", "kinds", offers=offers) == 0
    assert len(plans_in(tmp_path / "out")) == 2


def test_a_folder_with_plans_of_another_call_is_refused_before_the_search(problem, model, tmp_path, capsys):
    assert asked(tmp_path, model, problem) == 0
    assert asked(tmp_path, model, problem) == 1
    assert "out has files; it needs to be a new or empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--budget-s", "1"], ["--groups"], ["--explain"], ["--hot-rows"]])
def test_options_that_do_not_go_with_each_are_named(problem, model, tmp_path, capsys, option):
    given = [x for x in option if x.startswith("--")]
    call = f"plan {tmp_path}/p.json --offers {tmp_path}/o.json --each --out {tmp_path}/out".split()
    files.write_problem(tmp_path / "p.json", problem)
    assert main([*call, *option]) == 1
    assert f"--each was given with {given[0]}; it goes without" in capsys.readouterr().err


def test_each_takes_the_place_of_a_target_and_needs_offers(problem, model, tmp_path, capsys):
    with pytest.raises(SystemExit):
        asked(tmp_path, model, problem, "--each", "--step-ms", "5")
    assert "not allowed with argument" in capsys.readouterr().err
    call = f"plan {tmp_path}/problem.json --model {model} --each --out {tmp_path}/out"
    files.write_problem(tmp_path / "problem.json", problem)
    assert main(call.split()) == 1
    assert "--each columns needs --offers" in capsys.readouterr().err


def test_no_offer_with_room_is_one_line_and_writes_nothing(problem, model, tmp_path, capsys):
    assert asked(tmp_path, model, problem, offers=[BOX | {"memory_bytes": 1000}]) == 1
    assert "does not fit" in capsys.readouterr().err and not (tmp_path / "out").exists()
