"""The door of all formats: what bytes, values and records may be, and how what they may not be is named."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from shardcore.core.errors import MOST_CHARACTERS, ShardCoreError, escape_unprintable, shorten
from shardcore.core.validation import number_within, one_of, require_types, short_repr
from shardcore.cost.fit_config import FitConfig
from shardcore.io import schema


@dataclass(frozen=True)
class Inner:
    number: int
    share: float = 0.5

    def __post_init__(self):
        if self.number < 0:
            raise ShardCoreError(f"inner has number {self.number}; it needs 0 or more")


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    many: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_name: Mapping[str, float] | None = None
    kind: Literal["a", "b"] = "a"
    free: Any = None
    flag: bool = False
    either: float | str = 0.0


WHOLE = {"name": "n", "inner": {"number": 1}}


def test_a_record_is_made_with_all_within_it():
    given = {
        **WHOLE,
        "many": [{"number": 2, "share": 1}],
        "pair": [3, "x"],
        "by_name": {"k": 2},
        "kind": "b",
        "free": [1, {"a": None}],
        "flag": True,
        "either": "text",
    }
    assert schema.build_record(Outer, given, "it") == Outer(
        "n", Inner(1), (Inner(2, 1),), (3, "x"), {"k": 2}, "b", [1, {"a": None}], True, "text"
    )
    assert schema.build_record(Outer, WHOLE, "it") == Outer("n", Inner(1))
    assert schema.build_record(Outer, {"name": "n"}, "it", inner=Inner(7)).inner.number == 7


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "it is []; it needs to be an object with keys"),
        (
            {**WHOLE, "x": 1},
            "it has an unknown key 'x'; known are name, inner, many, pair, by_name, kind, free, flag, either",
        ),
        ({"name": "n"}, "it lacks the key 'inner'"),
        ({**WHOLE, "name": 1}, "it: name is 1; it needs to be a text"),
        ({**WHOLE, "flag": 1}, "it: flag is 1; it needs to be True or False"),
        ({**WHOLE, "inner": {"number": True}}, "it: inner: number is True; it needs to be a whole number"),
        ({**WHOLE, "inner": {"number": 1.0}}, "it: inner: number is 1.0; it needs to be a whole number"),
        (
            {**WHOLE, "inner": {"number": 1, "share": False}},
            "it: inner: share is False; it needs to be a number",
        ),
        ({**WHOLE, "inner": {"number": -1}}, "it: inner has number -1; it needs 0 or more"),
        ({**WHOLE, "many": [{"number": 1}, 3]}, "it: many[1] is 3; it needs to be an object with keys"),
        ({**WHOLE, "many": "text"}, "it: many is 'text'; it needs to be a list of Inners"),
        ({**WHOLE, "pair": [1]}, "it: pair is [1]; it needs to be [a whole number, a text]"),
        ({**WHOLE, "pair": [1, 2]}, "it: pair[1] is 2; it needs to be a text"),
        ({**WHOLE, "by_name": {"k": "v"}}, "it: by_name: 'k' is 'v'; it needs to be a number"),
        ({**WHOLE, "by_name": {1: 1.0}}, "it: by_name is {1: 1.0}; it needs to be a mapping"),
        ({**WHOLE, "kind": "c"}, "it: kind is 'c'; it needs to be 'a' or 'b'"),
        ({**WHOLE, "either": None}, "it: either is None; it needs to be a number or a text"),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(ShardCoreError) as error:
        schema.build_record(Outer, given, "it")
    assert str(error.value) == message


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"a": 1, "b": [2, 3], "a": 4}', "is not whole JSON: key 'a' appears twice"),
        (b'{"a": NaN}', "the number NaN is not finite"),
        (b'{"a": -Infinity}', "the number -Infinity is not finite"),
        (b"1e999", "the number 1e999 is not finite"),
        (b"9007199254740993", "the number 9007199254740993 is too large"),
        (b"1" * 5000, "is too large"),
        (b"-" + b"9" * 400, "is too large"),
        (b"[1, 2", "is not whole JSON"),
        (b"", "is not whole JSON"),
        (b"-9007199254740993", "the number -9007199254740993 is too large"),
        (b"[" * 100_000, "deeper than 24"),
        (b"[" * 25 + b"]" * 25, "has values within values, deeper than 24"),
        (b'"\\ud800"', "surrogates not allowed"),
        (b'{"a": "\xff"}', "is no text in UTF-8: invalid start byte at byte 7"),
    ],
)
def test_json_is_bounded(tmp_path, content, message):
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(ShardCoreError) as error:
        schema.read_json(tmp_path / "f.json")
    assert message in str(error.value) and "f.json" in str(error.value)


def test_json_of_too_many_values_is_refused_before_it_fills_memory(monkeypatch):
    with pytest.raises(ShardCoreError, match="x has about 33,554,435 values; files of at most 33,554,432"):
        schema.parse_json(b"[" + b"{}," * (schema.MOST_VALUES // 2) + b"{},0]", "x")

    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(schema.json, "loads", full)
    with pytest.raises(ShardCoreError, match="x has 2 bytes; this process has no memory to read it"):
        schema.parse_json(b"{}", "x")


def test_what_json_may_hold_is_read(tmp_path):
    value = {
        "deep": json.loads("[" * 23 + "]" * 23),
        "n": [2**53, -(2**53), 1e308, 0.1],
        "text": "\U0001f600 名\n",
    }
    for ascii_only in (True, False):
        (tmp_path / "f.json").write_text(json.dumps(value, ensure_ascii=ascii_only), "utf-8")
        assert schema.read_json(str(tmp_path / "f.json")) == value


@pytest.mark.timeout(30)  # to read a pipe that nobody writes to never ends
def test_only_files_of_a_bounded_size_are_read(tmp_path):
    with pytest.raises(ShardCoreError, match="it is a folder"):
        schema.read_bytes(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ShardCoreError, match="pipe: it is no file"):
        schema.read_bytes(tmp_path / "pipe")
    with pytest.raises(ShardCoreError, match=r"a\\x00b: no file has such a name"):
        schema.read_bytes("a\0b")
    with pytest.raises(ShardCoreError, match="absent: No such file"):
        schema.read_bytes(tmp_path / "absent")
    with open(tmp_path / "large", "wb") as f:
        f.truncate(schema.MOST_FILE_BYTES + 1)
    with pytest.raises(
        ShardCoreError, match="large has 536,870,913 bytes; files of at most 536,870,912 are read"
    ):
        schema.read_json(tmp_path / "large")
    (tmp_path / "four").write_bytes(b"four")
    assert schema.read_bytes(tmp_path / "four", 4) == b"four"
    with pytest.raises(ShardCoreError, match="at most 3 are read"):
        schema.read_bytes(tmp_path / "four", 3)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: &x [1]\nb: *x\n", "line 2 has an alias, *x; write it out"),
        ("a: 1\n<<<<<<< HEAD\nb: 2\n=======\n", "is not YAML"),
        ("a: !!python/tuple [1]\n", "is not YAML"),
        ("a: 2024-13-45\n", "is not YAML"),
        ("? {a: 1}\n: 2\n", "is not YAML"),
        ("a: 1\nb: 2\na: 3\n", "key 'a' appears twice"),
        ("a: .nan\n", "the number nan is not finite"),
        ("a: 1:9:9:9:9:9:9:9:9:9:9:9\n", "is too large"),
        ("a: [.inf]\n", "the number inf is not finite"),
        ("<<: 3\n", "is not YAML"),
        ("a: [1\n", "is not YAML"),
        ("[" * 3000, "is not YAML|deeper than 24"),
        ("a: " + "[" * 24 + "]" * 24, "deeper than 24"),
    ],
)
def test_yaml_is_bounded(tmp_path, text, message):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ShardCoreError) as error:
        schema.read_yaml(tmp_path / "f.yaml")
    assert any(s in str(error.value) for s in message.split("|")) and "f.yaml" in str(error.value)


def test_yaml_is_read(tmp_path):
    (tmp_path / "f.yaml").write_text("a: [1, 2.5]\nb: null  # a comment\n")
    assert schema.read_yaml(tmp_path / "f.yaml") == {"a": [1, 2.5], "b": None}


def test_a_message_is_one_line_of_bounded_length():
    long = ShardCoreError(f"table {'x' * 10**6!r} has rows -1; it needs at least 1")
    assert len(str(long)) == MOST_CHARACTERS
    assert str(long).startswith("table 'xxx") and str(long).endswith("xxx' has rows -1; it needs at least 1")
    assert str(ShardCoreError("a\nb\x1b[31m\ud800\u202e")) == "a\\nb\\x1b[31m\\ud800\\u202e"
    assert (
        escape_unprintable("名 plain") == "名 plain"
        and shorten("abc", 3) == "abc"
        and len(shorten("a" * 99, 20)) == 20
    )


def test_a_value_in_a_message_is_short_however_large_it_is():
    bomb: list = ["x"] * 9
    for _ in range(6):
        bomb = [bomb] * 9  # 5 million entries
    assert len(short_repr(bomb)) <= 80 and short_repr(bomb).startswith("[[[[...], [...]")
    assert short_repr(10**5000) == "a whole number that is too long"
    assert (
        short_repr({"a": [1, "x"]}) == "{'a': [1, 'x']}"
        and short_repr((1,)) == "(1,)"
        and short_repr([]) == "[]"
    )
    assert short_repr(list(range(9))) == "[0, 1, 2, 3, 4, 5, ...]" and short_repr("a\n") == "'a\\n'"


@pytest.mark.parametrize(
    "text",
    [
        f"a: 1{':0' * 300}.5",
        'a: !!int ""',
        'a: !!float ""',
        f"a: !!set {{? 0x{'f' * 5000}}}",
        'a: "\\uD800"',
        f"a: 1{':0' * 5000}",
    ],
)
def test_yaml_of_odd_numbers_tags_and_half_characters_is_refused(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ShardCoreError, match="is not YAML"):
        schema.read_yaml(tmp_path / "a.yaml")


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "log").write_bytes(b"12345")
    monkeypatch.setattr(schema, "_regular_file_size", lambda path: 3)
    with pytest.raises(ShardCoreError, match="it grows while it is read"):
        schema.read_bytes(tmp_path / "log")


def test_files_that_claim_no_size_are_read_as_empty_at_once():
    """/proc/kmsg waits for the kernel's next message."""
    assert schema.read_bytes("/proc/self/pagemap") == schema.read_bytes("/proc/kmsg") == b""


# --- several faults -----------------------------------------------------------------------------------------------


def faults_of(data: dict[str, Any], cls: type = Outer) -> list[str]:
    with pytest.raises(ShardCoreError) as info:
        schema.build_record(cls, data, "it")
    return str(info.value).split("\n")


def test_several_faults_of_a_record_and_of_its_lists_are_named_at_once():
    many = [{"number": 1}, {"number": -1}, {"number": "x"}, 3]
    data = {"inner": {"number": 2, "size": 1}, "many": many, "kind": "c", "colour": "red"}
    assert faults_of(data) == [
        "it has an unknown key 'colour'; known are name, inner, many, pair, by_name, kind, free, flag, either",
        "it lacks the key 'name'",
        "it: inner has an unknown key 'size'; known are number, share",
        "it: many[1]: inner has number -1; it needs 0 or more",
        "it: many[2]: number is 'x'; it needs to be a whole number",
        "... and 2 more",
    ]


@dataclass(frozen=True)
class Limited:
    free: int
    share: Annotated[float | None, number_within(0, 1)] = None
    kind: Annotated[str, one_of(("a", "b"))] = "a"

    def __post_init__(self):
        require_types(self, "a limited one")


def test_values_beyond_the_limits_of_annotations_are_named_at_once():
    assert Limited(1).share is None and schema.build_record(
        Limited, {"free": 1, "share": 1}, "it"
    ) == Limited(1, 1.0)
    words = "a limited one has share 2.0; it needs 0 to 1; a limited one has kind 'c'; known are a, b"
    with pytest.raises(ShardCoreError, match=f"^{words}$"):
        Limited(1, share=2.0, kind="c")
    with pytest.raises(schema.Faults) as error:
        schema.build_record(Limited, {"free": "x", "share": 2.0, "kind": "c"}, "it")
    assert str(error.value).split("\n") == [
        "it: free is 'x'; it needs to be a whole number",
        "it has share 2.0; it needs 0 to 1",
        "it has kind 'c'; known are a, b",
    ]


def test_one_fault_of_many_entries_is_one_line():
    many = [{"number": 1}] * 3 + [{"number": -1}]
    assert faults_of({**WHOLE, "many": many}) == ["it: many[3]: inner has number -1; it needs 0 or more"]


def test_very_many_faults_are_not_all_looked_for(monkeypatch):
    looked_at: list[Any] = []
    monkeypatch.setattr(
        schema,
        "build_record",
        lambda cls, data, what, _build=schema.build_record: looked_at.append(0) or _build(cls, data, what),
    )
    lines = faults_of({**WHOLE, "many": [{}] * 50_000})
    assert lines[0] == "it: many[0] lacks the key 'number'" and lines[5:] == ["... and 995 more at least"]
    assert len(looked_at) < 5_000


def test_a_name_comes_before_each_fault_of_several():
    many = [{"number": -1}, {"number": "x"}]
    with pytest.raises(schema.Faults) as info, schema.prefix_errors("a.json"):
        schema.build_record(Outer, {**WHOLE, "many": many}, "its plan")
    assert str(info.value).split("\n") == [
        "a.json: its plan: many[0]: inner has number -1; it needs 0 or more",
        "a.json: its plan: many[1]: number is 'x'; it needs to be a whole number",
    ]
    with (
        pytest.raises(ShardCoreError, match=r"^a\.json: inner has number -1"),
        schema.prefix_errors("a.json"),
    ):
        Inner(-1)


def test_several_faults_are_one_line_in_the_message_of_another_error():
    """Callers write f"{path}: {error}", whose line ends would be shown as backslash and n."""
    with pytest.raises(schema.Faults) as info:
        schema.build_record(Outer, {**WHOLE, "many": [{"number": -1}, 3]}, "it")
    assert str(ShardCoreError(f"a.json: {info.value}")) == (
        "a.json: it: many[0]: inner has number -1; it needs 0 or more; it: many[1] is 3; it needs to be an object "
        "with keys"
    )


def test_text_may_begin_with_a_byte_order_mark(tmp_path):
    """Windows' editors and spreadsheets put one there."""
    (tmp_path / "f").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert schema.read_json(tmp_path / "f") == schema.read_yaml(tmp_path / "f") == {"a": 1}


def test_faults_keep_to_printable_lines_without_passwords():
    """Values come from files that anybody may have written."""
    lines = faults_of({**WHOLE, "name": ["a\nb" * 1000], "kind": "http://user:secret@host", "flag": 1})
    assert len(lines) == 3 and all(len(line) <= MOST_CHARACTERS and line.isprintable() for line in lines)
    assert not any("secret" in line for line in lines)


def test_a_field_that_the_caller_sets_is_refused_in_the_data_whatever_makes_it():
    with pytest.raises(ShardCoreError, match="^it has an unknown key 'inner'; known are name"):
        schema.build_record(Outer, WHOLE, "it", inner=lambda: Inner(1))
    assert schema.build_record(Outer, {"name": "n"}, "it", inner=lambda: Inner(3)).inner.number == 3


def test_several_settings_beyond_their_ends_have_a_line_each():
    lines = faults_of({"epochs": 0, "patience": -1, "seed": 3}, FitConfig)
    assert [line.split(";")[0] for line in lines] == [
        "it has epochs 0",
        "it has patience -1",
    ]
