"""Headless Chromium for tests of pages, and a watch over what a page must never do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -e '.[test]'"
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# It asks nobody on the network: there is none in a test.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; skips the tests that want it where Debian's package `chromium` is missing."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def visit(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """A page that is open at an address, in a profile of its own with these options.

    Fails when the page throws, shows a dialog of the browser, is held back by its policy, or asks
    any other server.
    """
    problems: list[str] = []
    context = browser.new_context(**options)
    context.set_default_timeout(15_000)
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(f"threw {error}"))
    page.on("dialog", lambda dialog: problems.append(f"showed {dialog.message}"))
    page.on("request", lambda request: problems.extend(_outside(request.url, url)))
    page.on("console", lambda message: problems.extend(_refusals(message.text)))
    context.on("page", lambda opened: problems.append(f"opened {opened.url}"))
    page.goto(url)
    yield page
    context.close()
    assert problems == []


def start_over(page: Page) -> None:
    """Opens a page anew, as a first visitor would find it."""
    page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    page.reload()


def _outside(asked: str, url: str) -> list[str]:
    own = (url, f"blob:{url}", "data:image/")  # pictures that the reader has attached
    return [] if asked.startswith(own) else [f"asked {asked}"]


def _refusals(text: str) -> list[str]:
    return [text] if "Content Security Policy" in text or "TrustedHTML" in text else []
