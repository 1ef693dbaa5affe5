"""Pages on a screen, where there is one."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path


def open_page(page: Path) -> bool:
    """Open a page in the browser. False if there is no screen or no browser."""
    has_screen = sys.platform in ("darwin", "win32") or any(
        map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))
    )
    return has_screen and webbrowser.open(page.resolve().as_uri())
