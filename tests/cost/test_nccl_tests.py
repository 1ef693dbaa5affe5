"""Logs of nccl-tests as timings of a profile. The logs are written as the tools print them, with made times."""

import numpy as np
import pytest

from shardcore.cli import main
from shardcore.core.errors import ShardCoreError
from shardcore.cost.nccl_tests import read_nccl_logs
from shardcore.cost.profile import load_network, load_profile
from shardcore.cost.profile_fit import Predictor, Timing

PROFILE = load_profile("nvidia-h100-sxm")
SIZES = [1 << n for n in range(16, 31, 2)]
HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
OLD_HEADER = """\
#                                             out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def ranks_of(hosts: int = 2, each: int = 8, card: str = "NVIDIA H100 80GB HBM3") -> str:
    return "# Using devices\n" + "".join(
        f"#  Rank {h * each + d:2} Group  0 Pid  {100 + d} on   node{h:03} device {d:2} [0000:{d:02x}:00] {card}\n"
        for h in range(hosts)
        for d in range(each)
    )


def row(size: int, us: float | str, wrong: int | str = 0) -> str:
    return f"{size:12} {size // 4:12}   float   none   -1   {us}  1.0  1.0   {wrong}   9.99  1.0  1.0   N/A\n"


def log(tool: str = "alltoall_perf", us: float = 100.0, ranks: str | None = None, rows: str = "") -> str:
    return (
        "# nccl-tests version 2.17.8 nccl-headers=22902 nccl-library=22902\n"
        f"# Collective test starting: {tool}\n"
        "# nThread 1 nGpus 1 minBytes 65536 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20\n#\n"
        f"{ranks_of() if ranks is None else ranks}#\n{HEADER}"
        f"{rows or row(1 << 20, us)}"
        "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 24.7\n#\n"
    )


def read(tmp_path, text: str, name: str = "run.log"):
    (tmp_path / name).write_text(text)
    return read_nccl_logs([tmp_path / name], PROFILE)


def test_runs_of_one_log_are_of_their_own_collectives_ranks_and_hosts(tmp_path):
    text = (
        log(us=431.5)
        + log("all_reduce_perf", 22.02, ranks_of(1, 4))
        + log("reduce_scatter_perf", ranks=ranks_of(4, 1))
    )
    timings, reasons = read(tmp_path, text)
    assert [(t.op, len(t.sent), t.hosts, t.sent[0], t.time_us) for t in timings] == [
        ("alltoall", 16, 2, 1 << 20, 431.5),
        ("allreduce", 4, 1, 1 << 20, 22.02),
        ("reducescatter", 4, 4, 1 << 20, 100.0),
    ]
    assert not reasons


@pytest.mark.parametrize(
    "tag",
    [
        "[1,0]<stdout>:",
        "   [1,0]<stdout>: ",
        "[prterun-node0-123@1,0]<stdout>: ",
        "[0] ",
        "0: ",
        " 12: ",
        "    ",
    ],
)
def test_tags_of_launchers_are_left_out(tmp_path, tag):
    tagged = "".join(f"{tag}{line}\n" for line in log().splitlines())
    [timing], _ = read(tmp_path, "mpirun: some warning\n\n" + tagged)
    assert (timing.op, len(timing.sent), timing.time_us) == ("alltoall", 16, 100.0)


def test_the_name_that_a_run_gives_itself_counts_whatever_else_is_mentioned(tmp_path):
    text = (
        "will run: all_gather_perf all_reduce_perf\n" + log("alltoall_perf_mpi") + "next: all_gather_perf\n"
    )
    [timing], _ = read(tmp_path, text + "# a remark\n", "all_reduce.log")
    assert timing.op == "alltoall"
    nameless = log().replace("# Collective test starting: alltoall_perf\n", "")
    [timing], _ = read(tmp_path, "+ mpirun build/all_gather_perf_mpi -b 8\n" + nameless, "all_reduce.log")
    assert timing.op == "allgather"
    _, reasons = read(tmp_path, "cc all_gather_perf\ncc all_reduce_perf\n" + nameless)
    assert reasons == {
        "a run after several tools were named is no collective of the law, or does not say which": 1
    }


def test_rows_with_timestamps_and_line_ends_of_windows_are_read(tmp_path):
    stamped = log(rows=row(1 << 20, 57.5).replace("\n", "  2026-11-30 12:00:00\n")).replace(
        "busbw #wrong\n", "busbw #wrong   timestamp\n"
    )
    [timing], _ = read(tmp_path, stamped.replace("\n", "\r\n"))
    assert timing.time_us == 57.5


def test_early_versions_leave_the_collective_to_the_name_of_the_file(tmp_path):
    text = (
        f"# nThread: 1 nGpus: 8 minBytes: 8 maxBytes: 134217728\n#\n{ranks_of(1)}{OLD_HEADER}"
        "     1048576        262144   float     sum    57.12   18.36   32.12  2e-07    56.90   18.43   32.25  1e-07\n"
    )
    [timing], _ = read(tmp_path, text, "allreduce-8gpus.txt")
    assert (timing.op, len(timing.sent), timing.time_us) == ("allreduce", 8, 57.12)
    assert read(tmp_path, text, "run7.txt")[1] == {
        "run7 is no collective of the law, or does not say which": 1
    }


@pytest.mark.parametrize(
    "text, reason",
    [
        (log("sendrecv_perf"), "sendrecv_perf is no collective of the law, or does not say which"),
        (log("alltoallv_perf"), "alltoallv_perf is no collective of the law, or does not say which"),
        (log(ranks=""), "its run lists fewer than two ranks"),
        (log(ranks=ranks_of(1, 1)), "its run lists fewer than two ranks"),
        (
            log(
                ranks=ranks_of(2, 2)
                + "#  Rank  4 Group  0 Pid  9 on  node9 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3\n"
            ),
            "its hosts have unequal numbers of ranks",
        ),
        (log(ranks=ranks_of(card="AMD Instinct MI300X")), "it is of AMD Instinct MI300X"),
        (log(rows=row(1 << 20, 100.0, 3)), "its values were wrong"),
        (log(rows=row(1 << 20, "N/A")), "its wall time is not there, or no number"),
        (log(rows=row(0, 0.0)), "nothing was exchanged"),
        (log().replace("    time   algbw", " cputime   algbw"), "its wall time is not there, or no number"),
        (
            log(rows="     1048576     262144   float   none   -1   12.0\n"),
            "the row is cut, or has other columns",
        ),
        (
            log(ranks=ranks_of().replace(":07:00", ":06:00")),
            "two of its ranks have one device, or two hosts have one name",
        ),
        (
            log(ranks=ranks_of(2, 1).replace("node001", "node000")),
            "two of its ranks have one device, or two hosts have one name",
        ),
        (
            log(
                ranks="".join(
                    x for x in ranks_of().splitlines(True) if "Rank  3" not in x and "Rank 12" not in x
                )
            ),
            "its list of ranks has gaps",
        ),
        (
            log(ranks=ranks_of().replace("Rank  1 Group  0", "Rank  1 Group  1")),
            "its ranks are in several groups",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_counted_with_the_reason(tmp_path, text, reason):
    timings, reasons = read(tmp_path, text)
    assert timings == [] and reasons == {reason: 1}


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "run.log has no table of nccl-tests"),
        ("# a page of something else\nsize count\n", "run.log has no table of nccl-tests"),
        (log(rows="# Truncated\n"), "run.log has no table of nccl-tests"),
        (
            log(ranks=2 * ranks_of(1, 2).replace("# Using devices\n", "")),
            "has rank 0 a second time; build nccl-tests",
        ),
        (log(rows=row(1 << 62, 100.0)), "run.log, line "),
    ],
)
def test_a_log_that_is_none_or_of_separate_processes_is_refused(tmp_path, text, words):
    with pytest.raises(ShardCoreError, match=words):
        read(tmp_path, text)


def test_a_network_follows_the_links_that_logs_show(tmp_path, monkeypatch, capsys):
    """Between these hosts an all-to-all takes twice as long as the profile says."""
    monkeypatch.chdir(tmp_path)
    asked = [Timing("", "", "alltoall", 1.0, sent=(float(n),) * 16, hosts=2) for n in SIZES]
    twice = 2 * Predictor(asked).times_us(PROFILE.rate_values)
    rows = "".join(row(n, round(us, 2)) for n, us in zip(SIZES, twice.tolist(), strict=True))
    (tmp_path / "a.log").write_text(log(rows=rows))
    (tmp_path / "b.log").write_text(log("broadcast_perf"))
    command = "profile network ours --from-nccl-tests a.log b.log --from nvidia-h100-sxm --out ours.json"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert f"a.log, b.log: {len(SIZES)} timings fitted, 1 left out\n" in out
    assert (
        "all-to-all of 16 on 2 hosts: mean error 50% before, " in out
        and "broadcast_perf is no collective" in out
    )
    network, fitted = load_network("ours.json"), load_profile("nvidia-h100-sxm@ours.json")
    assert (network.name, network.words) == ("ours", "a.log, b.log on nvidia-h100-sxm")
    assert np.abs(Predictor(asked).times_us(fitted.rate_values) / twice - 1).mean() < 0.15
    assert fitted.rates["all_reduce_between_hosts_gbps"] == PROFILE.rates["all_reduce_between_hosts_gbps"]
    assert fitted.rates["all_to_all_between_hosts_gbps"].source == "fitted to a.log"
    # By its data sheet, rates that no log depends on scale.
    assert main(f"{command} --network-gbps 25".split()) == 0
    halved = load_network("ours.json").rates
    assert halved["network_gbps"].value == 25 and halved[
        "all_reduce_between_hosts_gbps"
    ].value == pytest.approx(PROFILE.rates["all_reduce_between_hosts_gbps"].value / 2)


def test_logs_without_a_timing_of_the_card_say_why(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.log").write_text(log(ranks=ranks_of(card="Tesla V100-SXM2-32GB")))
    assert (
        main("profile network x --from-nccl-tests a.log --from nvidia-h100-sxm --out mine.json".split()) == 1
    )
    error = capsys.readouterr().err
    assert (
        "of 1 left out, 1: it is of Tesla V100-SXM2-32GB" in error and not (tmp_path / "mine.json").exists()
    )
