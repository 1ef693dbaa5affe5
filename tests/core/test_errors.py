"""Messages: no password of a URL is in them, and each thing is named once."""

import pytest

from shardcore.core.errors import Infeasible, ShardCoreError, message_with_name, redact_urls


@pytest.mark.parametrize(
    "text, shown",
    [
        ("s3://bucket/plans", "s3://bucket/plans"),
        ("no address: me:secret@host", "no address: me:secret@host"),
        ("ftp://me:secret@host/x fails", "ftp://…@host/x fails"),
        ("ftp://me:s@e/c:r@et@host/x", "ftp://…@host/x"),
        ("postgresql+psycopg2://me@db/p", "postgresql+psycopg2://…@db/p"),
        ("'sftp://me:secret@a/b' and \"ftp://you:other@c\"", "'sftp://…@a/b' and \"ftp://…@c\""),
        ("postgresql://db/p?user=me&password=secret&x=1", "postgresql://db/p?user=me&password=…&x=1"),
        ("https://h/o?X-Amz-Signature=abc&SAS_TOKEN=def", "https://h/o?X-Amz-Signature=…&SAS_TOKEN=…"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
    ],
)
def test_passwords_of_urls_are_in_no_message(text, shown):
    assert redact_urls(text) == shown
    for kind in (ShardCoreError, Infeasible):
        assert str(kind(f"plans are at {text}")) == f"plans are at {shown}"


@pytest.mark.parametrize(
    "name, message, said",
    [
        ("p.json, table 't'", "table 't' has rows 0", "p.json, table 't' has rows 0"),
        ("p.json, table 't'", "table 't2' has rows 0", "p.json, table 't': table 't2' has rows 0"),
        ("p.json, table 'a, b: c.d'", "table 'a, b: c.d' has", "p.json, table 'a, b: c.d' has"),
        ("p.json: device", "a device has speed 0", "p.json: device has speed 0"),
        ("p.json: constraints", "constraints.unsplit is 3", "p.json: constraints.unsplit is 3"),
        ("t: managed_collision", "managed collision has bytes -1", "t: managed_collision has bytes -1"),
        ("job.json", "job has bytes 0", "job.json: job has bytes 0"),
        ("p.json", "problem 'p' has no tables", "p.json: problem 'p' has no tables"),
    ],
)
def test_what_ends_a_name_and_begins_its_message_is_said_once(name, message, said):
    assert message_with_name(name, ShardCoreError(message)) == said
