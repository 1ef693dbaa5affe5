import dataclasses

from shardcore import report
from shardcore.core.types import Setting
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveSample, ComputeSample, EmulatedLinks, TimingSpread
from shardcore.measure.sampling.collectives import draw_collective_request
from shardcore.measure.sampling.groups import draw_compute_request
from shardcore.report import dataset_report

SETTING = Setting("test", 256)


def sample(tables, i, at, scale=1.0, error=None):
    request = draw_compute_request(tables, i, SETTING)
    spread = TimingSpread(scale, 0.9 * scale, 1.1 * scale, 5)
    found = ComputeSample(
        dataset.compute_id(SETTING, request),
        SETTING,
        request,
        spread,
        spread,
        at,
        slowdown=1.2,
        relative_ci=0.05,
    )
    return dataclasses.replace(found, forward=None, backward=None, error=error) if error else found


def test_a_dataset_report_says_coverage_noise_drift_and_repeatability(tables, tmp_path):
    samples = [sample(tables, i, float(i)) for i in range(5)] + [
        sample(tables, 5, 9.0, error="out of memory")
    ]
    repeats = [
        [sample(tables, 0, float(t), 1 + t / 100) for t in range(21)],
        [sample(tables, 1, 0.0), sample(tables, 1, 600.0, 1.05)],
        [sample(tables, 2, 0.0), sample(tables, 2, 600.0, 1.09)],
    ]
    rows = dict(dataset_report.dataset_summary(samples, repeats))
    assert rows["samples"] == "5 timed, 1 failed"
    assert (
        rows["reference op: timings"] == "21" and rows["reference op: drift as the clock showed it"] == "20%"
    )
    assert rows["agree within √2 × what they are known to"] == "50%"  # 5% and 9%, each known to 5%
    assert rows["spread of one sample's repeats"].startswith("20.0%")
    assert rows["samples timed again"] == "2, 10 minutes apart (median)"
    dataset_report.dataset_figure(samples, repeats, "title").savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000
    assert dict(dataset_report.dataset_summary([samples[-1]], [])) == {"samples": "0 timed, 1 failed"}


def test_a_figure_of_samples_that_all_failed_says_so(tables, tmp_path):
    failed = [sample(tables, i, 1.0, error="out of memory") for i in range(3)]
    figure = dataset_report.dataset_figure(failed, [], "title")
    figure.savefig(tmp_path / "f.png")
    assert "all 3 samples failed" in [t.get_text() for t in figure.texts]


def test_exchanges_are_summed_up_by_kind():
    spread = TimingSpread(2.0, 1.9, 2.1, 5)
    requests = [draw_collective_request(i, 2, 256) for i in range(20)]
    timed = [
        [
            (spread,) * 2 if direction in r.definition.directions else None
            for direction in ("forward", "backward")
        ]
        for r in requests
    ]
    samples = [
        CollectiveSample(str(i), SETTING, r, *directions, (0.0, 0.0), 1.0, None, i, False)
        for i, (r, directions) in enumerate(zip(requests, timed, strict=True))
    ]
    rows = dict(
        dataset_report.exchange_summary([*samples, dataclasses.replace(samples[0], error="a rank died")])
    )
    assert rows["exchanges"] == "20 timed, 1 failed" and rows["of them"].count("all_to_all fp32") == 1
    assert (
        rows["spread of one transfer's repeats"].startswith("10.0%") and rows["ranks"] == "2 to 2, median 2"
    )
    assert not any("emulated" in name for name in rows)
    far = dataclasses.replace(requests[0], hosts=2, emulated=EmulatedLinks(0.4, 2.0))
    rows = dict(dataset_report.exchange_summary([*samples, dataclasses.replace(samples[0], request=far)]))
    assert rows["over 2 emulated hosts, between 0.4 Gbit/s, within 2 Gbit/s"] == "1 exchanges"


def test_tables_align():
    lines = report.text_table(("name", "ms", "state"), [("a", 1, "up"), ("long", 22, "-")]).splitlines()
    assert lines == ["name  ms  state", "----  --  -----", "a      1  up", "long  22  -"]
    lines = report.text_table(("name", "is"), [("a", "1 up"), ("b", "2" * 50)], words=(1,)).splitlines()
    assert lines == ["name  is", f"----  {'-' * 40}", "a     1 up", f"b     {'2' * 50}"]
    assert [report.percent_change(*x) for x in ((9.0, 10.0), (15.0, 10.0), (1.0, 0.0))] == [
        "-10.0%",
        "+50.0%",
        "-",
    ]
    assert report.markdown_table(("a", "b"), [(1, "x")]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_tables_show_no_control_characters():
    for table in (report.text_table, report.markdown_table):
        assert all(line.isprintable() for line in table(("a", "b"), [("\x1b[31m", "x\ny")]).splitlines())
    assert report.markdown_table(["a"], [("x|y",)]).endswith("| x\\|y |")
