"""Griffe extension: lines `name: text` of our docstrings become lists."""

from __future__ import annotations

from typing import Any

import griffe

from docs.tools.reference import field_list


class Fields(griffe.Extension):
    """Docstrings with lists of fields and arguments."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = field_list(obj.docstring.value)
