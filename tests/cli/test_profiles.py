"""The commands of `profile`."""

import csv

import pytest

from shardcore.cli import main
from shardcore.cost.profile import (
    RATES,
    load_network,
    load_profile,
    network_names,
    profile_names,
    write_profile,
)

CARD = "nvidia-h100-sxm"
OPS = "op,time_us,B,E,D,L,optimizer".split(",")
ROWS = [
    ("fwd", 500.0, 65536, 10**7, 128, 16, "sgd"),
    ("bwd", 900.0, 65536, 10**7, 128, 16, "sgd"),
    ("fwd", 90.0, 2048, 10**6, 64, 4, "sgd"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_csv(columns=OPS, rows=ROWS):
    with open("t.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def test_list_has_all_profiles_and_show_all_rates_with_their_sources(capsys):
    assert main(["profile", "list"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in profile_names()) and "not of your machine" in out
    assert main(["profile", "show", CARD]) == 0
    out = capsys.readouterr().out
    for name, rate in load_profile(CARD).rates.items():
        assert f"\n{name} " in out and rate.source in out


def test_networks_lists_all_that_ship_with_their_links(capsys):
    assert main(["profile", "networks"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out and load_network(name).words in out for name in network_names())


def test_new_scales_a_profile_that_commands_and_jobs_then_take(here, capsys):
    made = f"profile new mine --from {CARD} --hbm-gbps 6700 --memory-gib 100 --l2-mib 60 --device-name MINE"
    assert main([*made.split(), "--out", "mine.json"]) == 0
    out = capsys.readouterr().out
    mine, card = load_profile("mine.json"), load_profile(CARD)
    assert (mine.name, mine.device_names, mine.memory_bytes) == ("mine", ("MINE",), 100 << 30)
    assert mine.rates["hbm_gbps"].value == 6700 and mine.rates["l2_bytes"].value == 60 << 20
    assert mine.rates["update_gbps"].value > card.rates["update_gbps"].value
    assert mine.rates["read_gbps"].uncertainty > card.rates["read_gbps"].uncertainty
    assert "scaled from nvidia-h100-sxm by hbm_gbps" in out
    assert main(["profile", "show", "mine.json"]) == 0
    assert capsys.readouterr().out.startswith(
        "mine, profile: published measurements, not of your machine: 100.0"
    )


def test_fit_moves_the_rates_that_timings_depend_on(here, capsys):
    write_csv(rows=[*ROWS, ("fwd", "", *ROWS[0][2:])])
    assert main(f"profile fit t.csv --from {CARD} --out fitted.json".split()) == 0
    assert "t.csv: 3 timings fitted, 1 left out\n     1  time_us is not stated\n" in capsys.readouterr().out
    fitted, start = load_profile("fitted.json"), load_profile(CARD)
    moved = {name for name in RATES if fitted.rates[name] != start.rates[name]}
    assert "forward_op_us" in moved and not any(name.startswith("all_to_all") for name in moved)


@pytest.mark.parametrize(
    "command, message",
    [
        ("show h100", "profile 'h100' is not known; known are "),
        ("show absent.json", "absent.json"),
        (
            f"new a/b --from {CARD} --out x.json",
            "profile 'a/b' has name 'a/b'; it needs a folder's name: letters",
        ),
        ("new mine --from h100 --out x.json", "profile 'h100' is not known; known are "),
        ("fit t.csv --from h100 --out x.json", "profile 'h100' is not known; known are "),
        (f"fit absent.csv --from {CARD} --out x.json", "absent.csv"),
        (f"fit t.csv --from {CARD} --out t.csv", "--out t.csv is the timings that is read"),
    ],
)
def test_bad_input_is_one_line(here, command, message, capsys):
    write_csv()
    assert main(["profile", *command.split()]) == 1
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out and not (here / "x.json").exists()


def test_a_fit_to_nothing_says_why_timings_are_left_out(here, capsys):
    write_csv(rows=[("fwd", "", *ROWS[0][2:]), ("gather", *ROWS[0][1:]), ("fwd", "", *ROWS[1][2:])])
    assert main(f"profile fit t.csv --from {CARD} --out x.json".split()) == 1
    assert "can be fitted to; of 3 left out, 2: time_us is not stated\n" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["op", "time_us", "B", "E", "D", "L"])
def test_a_csv_without_a_column_names_it(here, missing, capsys):
    kept = [i for i, column in enumerate(OPS) if column != missing]
    write_csv([OPS[i] for i in kept], [[row[i] for i in kept] for row in ROWS])
    assert main(f"profile fit t.csv --from {CARD} --out x.json".split()) == 1
    assert f"lacks the column '{missing}'" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "fast"])
def test_a_rate_that_is_not_positive_is_refused(here, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(f"profile new mine --from {CARD} --hbm-gbps {value} --out x.json".split())
    error = capsys.readouterr().err
    found = f"'{value}' is not a number" if value == "fast" else f"it is {value}"
    assert ended.value.code == 2 and f"argument --hbm-gbps: {found}; it needs more than 0" in error
    write_profile("p.json", load_profile(CARD))
    text = (here / "p.json").read_text().replace('"value": 3350.0', '"value": -3350.0')
    (here / "p.json").write_text(text)
    assert main(["profile", "show", "p.json"]) == 1 and "-3350" in capsys.readouterr().err
