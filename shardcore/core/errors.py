"""Errors that a user can mend, of one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_CHARACTERS = 400
"""Most characters of an error's message; a longer one is cut in the middle."""


class ShardCoreError(ValueError):
    """Error that a user can mend. The message names the thing in error, its value and what would be right.

    It is one line of printable characters, at most `most`: values in it come from files that anybody may have
    written. It has no password of a URL. Only io/schema.Faults has several lines.

    faults: the errors that it joins, where there are several.
    """

    most = MOST_CHARACTERS

    def __init__(self, message: str = "", faults: Sequence[ShardCoreError] = ()):
        super().__init__(shorten(escape_unprintable(redact_urls(shorten(message, 1 << 12))), self.most))
        self.faults = faults


class Infeasible(ShardCoreError):
    """Raised when no plan fits. The message names the cause, the excess and a remedy.

    So it may be longer.
    """

    most = 3 * MOST_CHARACTERS


class Overfull(Infeasible):
    """Raised when a plan takes more memory than its devices have. Another plan may fit."""


class SettingMismatch(ShardCoreError):
    """Raised when a problem, dataset or plan belongs to another setting than the model. The message shows both
    settings."""


class Unreachable(ShardCoreError):
    """Raised when a disk or service does not give a file that exists or may exist."""


_USER = re.compile(r"(?<=://)(?:[^\s'\"/:@]*:[^\s'\"]*|[^\s'\"/]*)@")
"""The user and password of a URL. A password with a slash is wrong there, and still a password."""
_SECRET = re.compile(r"(?i)([?&][^=&\s]*(?:pass|pwd|secret|token|key|sig)[^=&\s]*=)[^&\s'\"]+")
"""A secret among the parameters of a URL."""


def message_with_name(what: object, error: ShardCoreError) -> str:
    """Error message after the name of the thing in error, such as a file; words that end the name and start the message
    are not repeated.

    message_with_name("p.json, table 't'", "table 't' has ...")  "p.json, table 't' has ..."
    """
    message = str(error).removeprefix("a ")
    name = f" {what}".replace("_", " ")
    ends = [found.start() for found in re.finditer("[ .:]", message)]
    same = max((end for end in ends if name.endswith(f" {message[:end]}")), default=0)
    return f"{what}{message[same:]}" if same else f"{what}: {error}"


def redact_urls(text: str) -> str:
    """Text without the users, passwords and secrets of its URLs."""
    return _SECRET.sub(r"\1…", _USER.sub("…@", text)) if "://" in text else text


def escape_unprintable(text: str) -> str:
    """Text with escapes for unprintable characters: line ends, control characters, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, max_characters: int) -> str:
    """Text cut to at most `max_characters` characters; the start and end of a longer text are kept.

    They name the thing and what would be right.
    """
    if len(text) <= max_characters:
        return text
    end = max_characters * 2 // 5
    return f"{text[: max_characters - end - 5]} ... {text[-end:]}"
