"""Job: how a step runs around the embeddings."""

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job


def test_ids_hide_behind_the_dense_part_in_torchrecs_pipeline_only():
    assert Job().hides_ids_ms == Job().dense_ms == 0
    dense = {"dense_forward_ms": 2.0, "dense_backward_ms": 3.0}
    assert Job(**dense).hides_ids_ms == Job(**dense).dense_ms == 5
    alone = Job("none", **dense)
    assert (alone.hides_ids_ms, alone.dense_ms) == (0, 5)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"pipeline": "prefetch"}, "job has pipeline 'prefetch'; known are none, sparse_dist"),
        (
            {"dense_forward_ms": 1.0},
            "job has dense_forward_ms 1.0 and dense_backward_ms None; it needs both, or neither",
        ),
        ({"dense_backward_ms": 1.0}, "job has dense_forward_ms None and dense_backward_ms 1.0"),
        (
            {"dense_forward_ms": -1.0, "dense_backward_ms": 1.0},
            "job has dense_forward_ms -1.0; it needs 0 to",
        ),
        ({"dense_forward_ms": 1.0, "dense_backward_ms": float("nan")}, "job has dense_backward_ms nan"),
        ({"id_bytes": 2}, "job has id_bytes 2; it needs 4 or 8"),
        ({"length_bytes": 0}, "job has length_bytes 0; it needs 4 or 8"),
        ({"forward_payload": "int8"}, "job has forward_payload 'int8'; known are fp32, fp16, bf16"),
        (
            {"replica_optimizer": "lamb"},
            "job has replica_optimizer 'lamb'; known are sgd, adagrad, rowwise_adagrad, adam",
        ),
        ({"backward_payload": "fp8"}, "job has backward_payload 'fp8'; known are fp32, fp16, bf16"),
    ],
)
def test_what_no_job_has_is_refused(given, said):
    with pytest.raises(ShardCoreError) as refused:
        Job(**given)
    assert str(refused.value).startswith(said)


def test_whole_numbers_of_a_file_are_ms_like_others():
    job = Job(dense_forward_ms=1, dense_backward_ms=2)
    assert (job, type(job.dense_ms)) == (Job(dense_forward_ms=1.0, dense_backward_ms=2.0), float)
