"""Messages: no password of a URL is in them."""

import pytest

from shardcore.core.errors import Infeasible, ShardCoreError, redacted


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
    assert redacted(text) == shown
    for kind in (ShardCoreError, Infeasible):
        assert str(kind(f"plans are at {text}")) == f"plans are at {shown}"
