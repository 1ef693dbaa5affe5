"""Published timings: rows that are asked, kernels behind a flag, and each card by its own profile."""

import csv

import pytest

from bench import published, published_plans
from bench.published_cards import SHIPPED, shipped_profile_of_card
from shardcore.cost.profile import load_profile

ROW = {
    "source": "someone", "gpu": "H100", "op": "fwd", "B": "65536", "T": "1", "E": "1000000", "D": "128", "L": "20",
    "weights_precision": "fp32", "optimizer": "sgd", "mode": "device", "time_us": "900", "quality": "A", "notes": "",
    "ranks": "", "hosts": "", "interconnect": "", "msg_bytes_per_rank": "", "busbw_GBps": "",
}  # fmt: skip
STEP = ROW | {
    "op": published_plans.STEP, "time_us": "3500", "ranks": "8", "hosts": "1", "B": "55296",
    "source": "v5.0/NAME/results/SYSTEM/dlrm/result_1.txt",
}  # fmt: skip


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """The output of `bench.published --ask` on these rows."""

    def run(*rows):
        path = tmp_path / "other.csv"
        with path.open("w") as file:
            writer = csv.DictWriter(file, ROW)
            writer.writeheader()
            writer.writerows(rows)
        monkeypatch.setattr("sys.argv", ["published", "--ask", str(path)])
        monkeypatch.setattr(published_plans, "_EVALS", 20)
        published.main()
        return capsys.readouterr().out

    return run


def test_asked_rows_are_judged_alone_and_named_so(ask):
    out = ask(ROW, ROW | {"time_us": "800"}, ROW | {"quality": "M"}, ROW | {"gpu": "RTX 2080"})
    assert "2 rows of" in out and "other.csv are judged, 2 are left out for the reasons below" in out
    assert "| asked \\| nvidia-h100-sxm \\| fwd, device | 2 |" in out and "fitted" not in out.replace(
        "not fitted", ""
    )
    assert "| no profile is of card 'RTX 2080' (quality A) | 1 |" in out and "| quality M | 1 |" in out
    # The repository's own file has steps; this one has none.
    assert "The file has no steps." in out


def test_kernels_behind_a_flag_are_left_out_by_name(ask):
    out = ask(ROW, ROW | {"gpu": "MI350", "notes": "hip_warp flag"})
    assert "1 rows of" in out and "kernels behind a flag" in out and "amd-mi350" not in out


def test_an_all_reduce_may_have_its_bus_bandwidth_in_place_of_its_time(tmp_path):
    """Tables of nccl-tests that are published often have no times: 1 GiB at 350 GB/s over 8 ranks takes 5.369 ms."""
    far = ROW | {
        "op": "allreduce", "ranks": "8", "hosts": "1", "msg_bytes_per_rank": str(1 << 30), "busbw_GBps": "350"
    }  # fmt: skip
    paths = [tmp_path / "one.csv", tmp_path / "other.csv"]
    for path, row in zip(paths, (ROW, far | {"time_us": ""}), strict=True):
        with path.open("w") as file:
            csv.DictWriter(file, ROW).writeheader()
            csv.DictWriter(file, ROW).writerow(row)
    published.write_reduced_timings(paths, tmp_path / "made.csv")
    with (tmp_path / "made.csv").open() as file:
        assert [row["time_us"] for row in csv.DictReader(file)] == ["900", "5368.71"]


def test_each_card_is_priced_by_its_own_profile(ask):
    out = ask(
        STEP,
        *(
            STEP | {"gpu": gpu, "source": f"v5.0/{gpu}/dlrm/result_1.txt"}
            for gpu in ("H200", "A100-80", "TPU")
        ),
    )
    prices = {
        cells[2].split(" x 8 ")[1]: cells[5]
        for line in out.splitlines()
        if len(cells := [cell.strip() for cell in line.split("|")]) > 6 and " x 8 " in cells[2]
    }
    assert set(prices) == {"H100", "H200", "A100-80"} and len(set(prices.values())) == 3
    assert "No profile is of card 'TPU': 1 left out." in out


def test_a_whole_step_stands_beside_the_published_one(ask):
    """Systems whose steps differ by their dense part only are in order by the whole step."""
    slow = STEP | {
        "B": "110592",
        "time_us": "7000",
        "source": "training_results_v5.0 NAME/results/SLOW/dlrm/result_1.txt",
    }
    out = ask(STEP, slow)
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if " x 8 H100 " in line]
    for *_, published_ms, embeddings_ms, step, error, _ in rows:
        step_ms = float(step.split()[0])
        assert float(embeddings_ms) < step_ms and "±" in step
        assert float(error.strip("%")) == pytest.approx(100 * (step_ms / float(published_ms) - 1), abs=1)
    assert [row[2] for row in rows] == ["1 x 8 H100"] * 2
    assert "1 of 1, between cards 0 of 0; by the embeddings alone 1 of 1" in out
    # Without the only card its own rate stands.
    assert "| H100 | 2 |" in out and "| v5.0 | 1 |" in out


def test_operations_are_those_of_mlperf_s_dense_part():
    """16.03 million weights: 0.17 of the first MLP, 10.62 of the cross network, 5.24 of the last MLP."""
    assert published_plans.dcnv2_mflops() == pytest.approx(2 * (0.170496 + 10.616832 + 5.243136))


@pytest.mark.parametrize(
    "gpu, name",
    [
        ("H100", "nvidia-h100-sxm"), ("A100-40", "nvidia-a100-40"), ("A100-80", "nvidia-a100-80"),
        ("MI355X", "amd-mi350"), ("H200", "nvidia-h200"), ("H200 NVL", None), ("TPU", None),
    ],
)  # fmt: skip
def test_a_card_has_the_profile_of_its_name(gpu, name):
    assert shipped_profile_of_card(gpu) == name
    assert name is None or (name in SHIPPED and load_profile(name))
