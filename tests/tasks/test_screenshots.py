"""Screenshots are of pages that show what they have to."""

import shutil

import pytest

from docs.tools import screenshots
from docs.tools.screenshots import Page, browser
from shardcore.core.errors import ShardCoreError

needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")


@pytest.mark.long
@needs_browser
def test_a_picture_is_of_a_page_with_its_text_and_no_other(tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text(
        "<p id=p></p><script>setTimeout(() => p.innerText = 'ready', 50)</script>"
    )
    address = (tmp_path / "page.html").as_uri()
    with browser() as chrome:
        assert chrome.picture(Page(address, "ready", height=400)).startswith(b"\x89PNG")
        monkeypatch.setattr(screenshots, "PATIENCE_S", 1.0)
        with pytest.raises(ShardCoreError, match=r"page.html does not show 'champion' within 1 s"):
            chrome.picture(Page(address, "champion"))


@pytest.mark.parametrize("name", ["prefect", "mlflow", "ray"])
def test_without_a_stack_its_pages_are_refused_by_name(name, monkeypatch):
    for setting in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(setting, raising=False)
    with pytest.raises(ShardCoreError, match=r"is not set; first: make up, then \. \.stack/env\.sh"):
        screenshots.PAGES[name](None)
