"""The chat page with a real server: models and adapters, Chinese, and formulas."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from predict.errors import UserError
from predict.request import SamplingParams
from predict.text.formulas import MAX_LATEX, Formulas
from tests.support.browser import chromium, sync_api, visit
from tests.support.http_server import ScriptedServer, config_of
from tests.support.tiny import TOKENIZER

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TEMPLATE = Path(__file__).parent / "templates" / "tools.jinja"
PAGE = Path(__file__).resolve().parents[2] / "predict" / "server" / "page"
FORMULA = r"It is \(\frac{a}{b}\), or $$\sqrt{x_1}$$ and \(\frac{\)."
expect = sync_api.expect


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    def script(prompt: str, params: SamplingParams) -> list[str]:
        return [FORMULA]

    config = config_of(TOKENIZER, TEMPLATE)
    engine = config.engine.changed(lora_modules=("sql=x", "chat=y"))
    with ScriptedServer(dataclasses.replace(config, engine=engine), script) as started:
        yield started


def test_a_model_and_one_of_its_adapters_are_chosen(
    browser: Browser, server: ScriptedServer
) -> None:
    with visit(browser, server.url) as page:
        expect(page.locator("#model-name")).to_have_text("test")
        page.locator("#open-settings").click()
        assert page.locator("#model option").all_inner_texts() == ["test"]
        names = page.locator("#adapter option").all_inner_texts()
        assert names == ["none, the model itself", "sql", "chat"]
        page.locator("#adapter").select_option("chat")
        page.keyboard.press("Escape")
        expect(page.locator("#model-name")).to_have_text("chat")
        page.get_by_label("Message", exact=True).fill("x")
        page.keyboard.press("Enter")
        expect(page.locator(".stats")).to_be_visible()
        assert server.engine.added[-1][1].adapter == "chat"
        page.reload()
        expect(page.locator("#model-name")).to_have_text("chat")


def test_formulas_are_drawn_and_what_is_none_stays(
    browser: Browser, server: ScriptedServer
) -> None:
    pytest.importorskip("latex2mathml")
    with visit(browser, server.url) as page:
        page.get_by_label("Message", exact=True).fill("x")
        page.keyboard.press("Enter")
        expect(page.locator("code.formula math")).to_have_count(2)
        assert page.locator("math mfrac").count() == 1
        assert page.locator('math[display="block"] msqrt msub').count() == 1
        assert page.locator("math").first.get_attribute("alttext") == r"\frac{a}{b}"
        expect(page.locator("code.formula").last).to_have_text(r"\(\frac{\)")


def test_the_page_speaks_chinese(browser: Browser, server: ScriptedServer) -> None:
    with visit(browser, server.url, locale="zh-CN") as page:
        expect(page.get_by_role("heading", name="向模型提问")).to_be_visible()
        assert page.locator("html").get_attribute("lang") == "zh-CN"
        page.locator("#open-settings").click()
        for words in ("温度", "停止串", "系统提示词", "适配器"):
            expect(page.get_by_label(words, exact=True)).to_be_visible()
        page.locator("#language").select_option("en")
        expect(page.get_by_role("heading", name="Ask the model")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="Ask the model")).to_be_visible()


def test_all_words_of_the_page_have_their_chinese() -> None:
    """Texts of index.html, and what scripts put through words(), button() and notify()."""
    table = (PAGE / "words.js").read_text(encoding="utf-8")
    known = set(re.findall(r'^  (?:"((?:[^"\\]|\\.)+)"|(\w+)):', table, re.MULTILINE))
    chinese = {quoted or bare for quoted, bare in known}
    html = (PAGE / "index.html").read_text(encoding="utf-8").partition("<body>")[2]
    shown = re.findall(r'(?:aria-label|title|placeholder)="([^"]+)"', html)
    shown += [each.strip() for each in re.findall(r">([^<>]*[A-Za-z]{2}[^<>]*)<", html)]
    kept = {"Regatta", "Enter", "Shift", "Esc", "English", "Language · 语言"}
    for name in ("app", "turns", "fields", "dom"):
        text = (PAGE / f"{name}.js").read_text(encoding="utf-8")
        shown += re.findall(r'(?:\bwords|\bbutton|notify|\bsay)\("([^"]+)"', text)
    missing = [each for each in shown if each not in kept and each not in chinese]
    missing = [each for each in missing if f" {each} " not in chinese and f" {each}" not in chinese]
    assert missing == []


@pytest.mark.parametrize(
    "latex",
    [
        r"\frac{",
        "{" * 1000,
        r"\left(" * 200,
        r"\begin{matrix}" + "a&" * 900,
        "a" * (MAX_LATEX + 1),
        "^" * 50,
    ],
)
def test_what_is_no_formula_is_refused_in_time(latex: str) -> None:
    pytest.importorskip("latex2mathml")
    with pytest.raises(UserError, match="latex"):
        Formulas().made(latex, True)


def test_trees_have_known_elements_alone(server: ScriptedServer) -> None:
    pytest.importorskip("latex2mathml")
    asked = {"latex": r"\href{javascript:alert(1)}{x} \text{<script>} \style{color:red}{y}"}
    text = httpx.post(f"{server.url}/page/formula", json=asked).text
    assert '"mtext",{},"<script>"' in text, "a text, which the page shows as one"
    for word in ("href", "javascript", "style", "color"):
        assert word not in text
    for wrong in ({"latex": 3}, {"latex": "x", "display": "yes"}, {}):
        assert httpx.post(f"{server.url}/page/formula", json=wrong).status_code == 400
