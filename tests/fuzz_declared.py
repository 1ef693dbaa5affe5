"""Damage of files that follows from the declarations of what they hold: each field of each record, in each way.

A sound file is read once, while calls of `schema.build_record` are watched. They tell which object of the file is which
record. Of each field of its declaration there are wrong types, values beyond its ends and words that are not known;
it is missing, unknown, huge, not a number, there twice, or has control characters. Lists and mappings have a damaged
entry too, one less, one twice, or an odd key.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from fuzz_files import Sound
from fuzz_formats import FORMATS
from sealing import sealed

from shardcore.cli.options import Field, option_declarations
from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import convert_to_type
from shardcore.io import files, schema

FILES: Mapping[str, str] = {
    **{
        name: f"{name}.json"
        for name in (
            *("problem", "pool", "plan", "grouped", "dmp", "offers", "torchrec", "towers", "profile"),
            "network",
        )
    },
    "move-rates": "move-rates.json",
    "job-report": "job-report/jobs/trainer.json",
    "replays": "replays/replays.json",
    "traced": "traces/sample/traced.json",
    "model": "model/model.json",
    "policy": "policy/policy.json",
    "plans": "plans/*/decisions/*.json",
    "params": "params.yaml",
    "job": "job/step-*/job.json",
}
"""The file with records of each format that has some."""
Node = tuple[str | int, ...]
"""The way to an object in a file's value."""


class Case(NamedTuple):
    """A damage of one field.

    at: the object that has the field. key: the field's.
    how: the damage, in words.
    value: what the field gets. _GONE: it goes. _TWICE: it is there twice.
    is_wrong: True if the declaration forbids it, so that reading has to refuse it.
    """

    at: Node
    key: str
    how: str
    value: Any
    is_wrong: bool


_GONE, _TWICE = object(), object()
_ODD: Mapping[str, Any] = {
    "a text": "ten",
    "a fraction": 2.5,
    "a number": 3,
    "true": True,
    "null": None,
    "a list": [[]],
    "an object": {"a": {"b": []}},
    "control characters": "a\nb\x1b[31m\x00",
    "a surrogate": "\ud800",
    "a long text": "x" * 100_000,
    "a path": "../../x",
    "nothing": "",
    "not a number": float("nan"),
    "infinite": float("-inf"),
    "huge": 10**40,
    "a large float": 1e308,
    "a tiny float": 1e-320,
    "negative": -1,
    "zero": 0,
}


def records_of(name: str, folder: Path, sound: Sound) -> dict[Node, type]:
    """The record that each object of a format's sound file is read as."""
    path = file_of(name, folder)
    wholes: list[Any] = []
    built: list[tuple[type, Any]] = []

    def watch(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code is schema.build_record.__code__:
            built.append((frame.f_locals["cls"], frame.f_locals["data"]))
        read = frame.f_code in (schema.read_json.__code__, schema.read_yaml.__code__)
        if event == "return" and read and str(frame.f_locals["path"]).endswith(path.name):
            wholes.append(arg)

    sys.setprofile(watch)
    try:
        FORMATS[name].use(folder, sound)
    finally:
        sys.setprofile(None)
    nodes = [(at, node) for whole in wholes for at, node in _objects(whole)]
    found: dict[Node, type] = {}
    for cls, data in built:
        # Readers take out some keys before, so an object counts that has all that is left.
        has = (at for at, node in nodes if isinstance(data, Mapping) and data and _has(node, data))
        at = next((at for at in has if at not in found), None)
        if at is not None:
            found[at] = cls
    return found


def _has(node: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    return all(key in node and node[key] is value for key, value in data.items())


def _objects(value: Any, at: Node = ()) -> Iterator[tuple[Node, Mapping[str, Any]]]:
    if isinstance(value, dict):
        yield at, value
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield from _objects(inner, (*at, key))


def cases(records: Mapping[Node, type], whole: Any) -> Iterator[Case]:
    """All damages of a file whose value is `whole`."""
    for at, cls in records.items():
        there = node_at(whole, at)
        yield Case(at, "unknown_key", "an unknown key", 1, True)
        yield Case(at, "__class__", "an unknown key", {}, True)
        for key, field in option_declarations(cls).items():
            if key in there:
                yield Case(at, key, "missing", _GONE, field.default is dataclasses.MISSING)
                yield Case(at, key, "there twice", _TWICE, True)
            elif field.default is dataclasses.MISSING:
                continue  # the reader sets it
            for how, value in (*_ODD.items(), *_beyond(field)):
                yield Case(at, key, how, value, _is_wrong(field, value))
            # A reader may take another form than the declaration, which then does not tell.
            declared = not _is_wrong(field, there.get(key))
            for how, value in _odd_entries(there.get(key)):
                is_wrong = _has_no_json(value) or (declared and _is_wrong(field, value))
                yield Case(at, key, how, value, is_wrong)


def _beyond(field: Field) -> Iterator[tuple[str, Any]]:
    """Values just beyond a field's ends, in it and in a list of it, and a word that is not known."""
    whole = int in (field.kind, *get_args(field.kind))
    for rule in field.rules:
        if rule.ends:
            low, high = (int(end) if whole and abs(end) < 1e300 else end for end in rule.ends)
            step = 1 if whole else max(abs(high), 1.0) * 1e-6
            yield "below its ends", low - step
            yield "above its ends", high + step
        if rule.known:
            yield "a word that is not known", "unheard_of"
    if get_origin(field.kind) is tuple:
        yield "a list of what is no entry", [None, {"a": 1}]
        yield "an empty list", []


def _odd_entries(value: Any) -> Iterator[tuple[str, Any]]:
    """The value with its first entry damaged, gone or there twice, or with an odd key."""
    if isinstance(value, list) and value:
        first, *rest = value
        yield "an entry less", rest
        yield "an entry twice", [first, *value]
        for how, odd in _ODD.items():
            yield f"an entry is {how}", [odd, *rest]
    if isinstance(value, dict) and value:
        key, first = next(iter(value.items()))
        others = {other: inner for other, inner in value.items() if other != key}
        yield "an entry less", others
        for how, odd in _ODD.items():
            yield f"an entry is {how}", {**value, key: odd}
            if isinstance(odd, str):
                yield f"a key is {how}", {odd: first, **others}


def _has_no_json(value: Any) -> bool:
    """Tell if a value has a number that files may not have: beyond 2^53 or not finite. Or a lone surrogate."""
    if isinstance(value, dict | list):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return any(map(_has_no_json, inner))
    if isinstance(value, float) and not abs(value) < float("inf"):
        return True
    return (isinstance(value, int) and abs(value) > schema.MOST_INT) or value == "\ud800"


def _is_wrong(field: Field, value: Any) -> bool:
    """Tell if a declaration forbids a value."""
    if _has_no_json(value):
        return True
    try:
        right = convert_to_type(value, field.kind, field.name, schema.build_record)
        for rule in field.rules:
            rule(right, "it", field.name)
    except ShardCoreError:
        return True
    return False


def node_at(whole: Any, at: Node) -> Any:
    for key in at:
        whole = whole[key]
    return whole


def file_of(name: str, folder: Path) -> Path:
    [path] = folder.glob(FILES[name])
    return path


def value_of(path: Path) -> Any:
    return (yaml.safe_load if path.suffix == ".yaml" else json.loads)(path.read_text())


def damage(path: Path, case: Case) -> None:
    """Damage a file. Its digest, or the name that is one, is made right again: neither is a secret."""
    value = value_of(path)
    held = node_at(value, case.at)
    if case.value is _GONE:
        del held[case.key]
    elif case.value is not _TWICE:
        held[case.key] = case.value
    if path.suffix == ".yaml":
        text = yaml.safe_dump(value, allow_unicode=False)
    else:
        if "digest" in value and case.key != "digest":
            value = sealed(value)
        text = json.dumps(value)
    if case.value is _TWICE:
        text = _with_key_twice(text, case, value, path.suffix == ".yaml")
    path.write_text(text, "utf-8", "surrogatepass")
    if path.parent.name == "decisions":
        try:
            name = files.json_digest(json.loads(path.read_text()))
        except ValueError:
            return
        path.rename(path.with_name(f"{name}.json"))
        (path.parents[1] / "current").write_text(f"{name}\n")


def _with_key_twice(text: str, case: Case, value: Any, is_yaml: bool) -> str:
    """The text of a file in which an object has a key twice."""
    held = node_at(value, case.at)
    mark = "twice_here"
    held[mark] = 0
    dumped: Callable[[Any], str] = yaml.safe_dump if is_yaml else json.dumps
    marked = dumped(value)
    del held[mark]
    return (
        marked.replace(f"{mark}: 0", f"{case.key}: 0")
        if is_yaml
        else marked.replace(f'"{mark}"', f'"{case.key}"')
    )
