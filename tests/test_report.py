import dataclasses

from shardcore import dataset, report, sampling
from shardcore.types import ComputeSample, Setting, Spread

SETTING = Setting("test", 256)


def sample(tables, i, at, scale=1.0, error=None):
    request = sampling.compute_request(tables, i, SETTING)
    spread = Spread(scale, 0.9 * scale, 1.1 * scale, 5)
    found = ComputeSample(dataset.compute_id(SETTING, request), SETTING, request, spread, spread, at)
    return dataclasses.replace(found, forward=None, backward=None, error=error) if error else found


def test_a_dataset_report_says_coverage_noise_drift_and_repeatability(tables, tmp_path):
    samples = [sample(tables, i, float(i)) for i in range(5)] + [sample(tables, 5, 9.0, error="out of memory")]
    repeats = [[sample(tables, 0, t, 1 + t / 10) for t in (0.0, 1.0, 2.0)],
               [sample(tables, 1, 0.0), sample(tables, 1, 5.0, 1.05)]]
    rows = dict(report.dataset_summary(samples, repeats))
    assert rows["samples"] == "5 timed, 1 failed"
    assert rows["drift of the control sample"] == "20.0% over 3 timings"
    assert rows["spread of one sample's repeats"].startswith("20.0%")
    assert rows["samples timed again"] == "2"
    report.dataset_figure(samples, repeats, "title").savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000
    assert dict(report.dataset_summary([samples[-1]], [])) == {"samples": "0 timed, 1 failed"}


def test_tables_align():
    lines = report.text_table(("name", "ms"), [("a", 1), ("long", 22)]).splitlines()
    assert lines == ["name  ms", "----  --", "a      1", "long  22"]
    assert report.percent_change(9.0, 10.0) == "-10.0%" and report.percent_change(1.0, 0.0) == "-"
