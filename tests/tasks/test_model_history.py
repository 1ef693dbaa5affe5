"""The history of champions, in a real registry."""

import json

import pytest
from tracking import tracked

from shardcore.report import history_pages
from tasks import model_history, registry

NAME = "shardcore-cost-law"


@pytest.fixture
def client(tmp_path):
    with tracked(tmp_path):
        made = registry.connect_to_mlflow()
        made.create_registered_model(NAME)
        yield made


def version(client, score: str = "5.0"):
    run = client.create_run("0")
    client.log_metric(run.info.run_id, "replays/mape", 7.5)
    client.log_metric(run.info.run_id, "replays/noise", 2.5)
    return client.create_model_version(
        NAME,
        f"runs:/{run.info.run_id}/model",
        run.info.run_id,
        tags={"score": score, "gate": "passed", "setting": "law", "noise": "3.5"},
    )


def test_each_champion_reigns_until_the_next_one(client, monkeypatch):
    first, second, _never = (version(client, score) for score in ("5.0", "4.0", "no number"))
    for now, champion in ((100, first), (150, first), (200, second), (300, first)):
        monkeypatch.setattr(model_history.time, "time", lambda now=now: now)
        model_history.record_champion(client, champion)
    found = {x.version: x for x in model_history.version_records(client, NAME)}
    assert found["1"].reigns == ((100, 200), (300, None))
    assert found["2"].reigns == ((200, 300),)
    assert found["3"].reigns == ()
    assert (found["1"].error, found["1"].replay_error, found["1"].gate) == (5.0, 7.5, "passed")
    assert (found["1"].noise, found["1"].replay_noise) == (3.5, 2.5)
    assert found["3"].error is None
    assert found["1"].registered_at == pytest.approx(first.creation_timestamp / 1000)


def test_what_was_edited_by_hand_or_deleted_is_left_out(client, monkeypatch):
    made = version(client)
    client.set_registered_model_tag(NAME, model_history.CHAMPIONS, '{"no": "list"}')
    assert [x.reigns for x in model_history.version_records(client, NAME)] == [()]
    model_history.record_champion(client, made)
    client.delete_run(made.run_id)
    [found] = model_history.version_records(client, NAME)
    assert len(found.reigns) == 1 and found.reigns[0][1] is None


@pytest.mark.parametrize("at", [1e18, float("nan"), "9" * 400])
def test_a_time_that_is_none_is_left_out_and_the_page_is_made(client, at):
    made = version(client, score="inf")
    client.set_registered_model_tag(NAME, model_history.CHAMPIONS, json.dumps([["1", 100], ["1", at]]))
    found = model_history.version_records(client, NAME)
    assert [x.reigns for x in found] == [((100, None),)] and found[0].error is None
    assert "1970-01-01" in history_pages.model_versions_page(NAME, found)
    model_history.record_champion(client, made)


@pytest.mark.long
def test_the_oldest_changes_go(client):
    one, other = version(client), version(client)
    for i in range(model_history._MOST + 5):
        model_history.record_champion(client, (one, other)[i % 2])
    kept = json.loads(client.get_registered_model(NAME).tags[model_history.CHAMPIONS])
    assert len(kept) == model_history._MOST
