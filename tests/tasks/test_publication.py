"""What is on record at a registered model about its publication, and what is due."""

import time

import mlflow
import pytest
from tracking import tracked

from tasks import publication
from tasks.publication import Publication

NOW = 1000.0


@pytest.mark.parametrize("state, due", [
    (Publication("m", None), False),
    (Publication("m", "1"), True),
    (Publication("m", "1", "1", NOW), False),
    (Publication("m", "2", "1", NOW), True),
    (Publication("m", "2", "1", NOW, "2", NOW + 1), False),
    (Publication("m", "2", "1", NOW, "2", NOW - 1), True),  # whoever was at it was killed
    (Publication("m", "2", "1", NOW, "1", NOW + 1), False),  # it changed while the last one was being published
    (Publication("m", "2", "1", NOW, "1", NOW - 1), True),
    (Publication("m", "2", "1", NOW, "2", None), True),  # a claim that says no time
    (Publication("m", "1", "1", NOW, "2", NOW - 1), False),
])
def test_due_where_the_champion_is_another_version_and_nobody_is_at_it(state, due):
    assert state.due(NOW) is due


def test_publishing_is_claimed_while_it_lasts_and_on_record_only_at_its_end(tmp_path):
    with tracked(tmp_path):
        client = mlflow.MlflowClient()
    assert publication.read(client, "m") == Publication("m", None)
    client.create_registered_model("m")
    version = client.create_model_version("m", str(tmp_path))
    client.set_registered_model_alias("m", "champion", version.version)
    with pytest.raises(KeyError), publication.publishing(client, version):
        claimed = publication.read(client, "m")
        assert (claimed.champion, claimed.publishing, claimed.published) == ("1", "1", None) and not claimed.due(time.time())
        raise KeyError
    assert publication.read(client, "m") == Publication("m", "1")
    with publication.publishing(client, version, everything=False) as renew:
        renew()
        assert publication.read(client, "m") == Publication("m", "1")
    with publication.publishing(client, version) as renew:
        before = publication.read(client, "m").until
        renew()
        assert publication.read(client, "m").until > before
        client.delete_registered_model_tag("m", publication.PUBLISHING)  # by another publisher, which was faster
    done = publication.read(client, "m")
    assert done.published == "1" and done.publishing is None and abs(done.at - time.time()) < 60
    client.set_registered_model_tag("m", publication.PUBLISHED, "by hand")
    assert publication.read(client, "m").due(time.time())
