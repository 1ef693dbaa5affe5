"""The state of publishing that is recorded at a registered model."""

import time

import mlflow
import pytest
from tracking import tracked

from tasks import publish_claim
from tasks.publish_claim import PublishState

NOW = 1000.0


@pytest.mark.parametrize(
    "state, due",
    [
        (PublishState("m", None), False),
        (PublishState("m", "1"), True),
        (PublishState("m", "1", "1", NOW), False),
        (PublishState("m", "2", "1", NOW), True),
        (PublishState("m", "2", "1", NOW, "2", NOW + 1), False),
        (PublishState("m", "2", "1", NOW, "2", NOW - 1), True),  # whoever was at it was killed
        # it changed while the last one was being published
        (PublishState("m", "2", "1", NOW, "1", NOW + 1), False),
        (PublishState("m", "2", "1", NOW, "1", NOW - 1), True),
        (PublishState("m", "2", "1", NOW, "2", None), True),  # a claim that says no time
        (PublishState("m", "1", "1", NOW, "2", NOW - 1), False),
        # a publisher on another host, whose clock is some seconds ahead
        (PublishState("m", "2", "1", NOW, "2", NOW + publish_claim.CLAIM_S + 5), False),
        # claimed while the clock was a week, and two minutes, ahead
        (PublishState("m", "2", "1", NOW, "2", NOW + 7 * 86400 + publish_claim.CLAIM_S), True),
        (PublishState("m", "2", "1", NOW, "1", NOW + 120 + publish_claim.CLAIM_S), True),
    ],
)
def test_due_where_the_champion_is_another_version_and_nobody_is_at_it(state, due):
    assert state.is_due(NOW) is due


def test_publishing_is_claimed_while_it_lasts_and_on_record_only_at_its_end(tmp_path, monkeypatch):
    with tracked(tmp_path):
        client = mlflow.MlflowClient()
    assert publish_claim.read_publish_state(client, "m") == PublishState("m", None)
    client.create_registered_model("m")
    version = client.create_model_version("m", str(tmp_path))
    client.set_registered_model_alias("m", "champion", version.version)
    with pytest.raises(KeyError), publish_claim.claimed_publishing(client, version):
        claimed = publish_claim.read_publish_state(client, "m")
        assert (claimed.champion, claimed.publishing, claimed.published) == (
            "1",
            "1",
            None,
        ) and not claimed.is_due(time.time())
        raise KeyError
    assert publish_claim.read_publish_state(client, "m") == PublishState("m", "1")
    with publish_claim.claimed_publishing(client, version, everything=False):
        assert publish_claim.read_publish_state(client, "m") == PublishState("m", "1")
    monkeypatch.setattr(publish_claim, "CLAIM_S", 0.3)
    with publish_claim.claimed_publishing(client, version):
        before, deadline = publish_claim.read_publish_state(client, "m").until, time.monotonic() + 60
        while (
            publish_claim.read_publish_state(client, "m").until <= before
        ):  # it is renewed, whatever the publisher does
            assert time.monotonic() < deadline, "the claim is not renewed"
            time.sleep(0.02)
        # by another publisher, which was faster
        client.delete_registered_model_tag("m", publish_claim.PUBLISHING)
    done = publish_claim.read_publish_state(client, "m")
    assert done.published == "1" and done.publishing is None and abs(done.at - time.time()) < 60
    client.set_registered_model_tag("m", publish_claim.PUBLISHED, "by hand")
    assert publish_claim.read_publish_state(client, "m").is_due(time.time())
    for until in ('"tomorrow"', "1e18", "[]", "NaN"):
        claim = f'{{"version": "1", "until": {until}}}'
        client.set_registered_model_tag("m", publish_claim.PUBLISHING, claim)
        assert publish_claim.read_publish_state(client, "m").is_due(time.time())
