"""The chat page in a browser, with a server whose answers are scripts."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import openai_server
from tests.support.browser import chromium, start_over, sync_api, visit
from tests.support.openai_server import Answer, FakeServer, chat_events, events

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    Answers = Callable[[dict[str, Any]], Answer]

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "predict" / "server" / "page"
expect = sync_api.expect


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    with FakeServer(echo, static=FILES) as started:
        yield started


@pytest.fixture
def server(running: FakeServer) -> FakeServer:
    running.answer = echo
    running.bodies.clear()
    running.cut.clear()
    return running


@pytest.fixture(scope="module")
def opened(browser: Browser, running: FakeServer) -> Iterator[Page]:
    with visit(browser, running.url) as page:
        yield page


@pytest.fixture
def page(opened: Page, server: FakeServer) -> Page:
    start_over(opened)
    return opened


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def echo(body: dict[str, Any]) -> Answer:
    """Says again what was asked, in two pieces."""
    text = body["messages"][-1]["content"]
    return Answer(chat_events(["You said: ", text], usage=(7, 2)))


def says(*deltas: str | dict[str, Any], usage: tuple[int, int] | None = (12, 3)) -> Answers:
    return lambda body: Answer(chat_events(deltas, usage=usage))


def fails(status: int, body: bytes, **headers: str) -> Answers:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda body_: Answer([body], status=status, headers=named)


class Held:
    """An answer whose last pieces wait until they are let go, or the reader goes away."""

    def __init__(self, breaks: bool = False) -> None:
        self.may_end = threading.Event()
        self.deltas = ["first ", "last"]
        self.breaks = breaks  # the connection, in place of the last pieces

    def __call__(self, body: dict[str, Any]) -> Answer:
        return Answer(self.chunks(), pause_s=0.01, breaks=self.breaks)

    def chunks(self) -> Iterator[bytes]:
        first, *rest = chat_events(self.deltas, usage=(1, 2))
        yield first
        yield rest[0]
        while not self.may_end.is_set():
            yield b": keeps the connection alive\n\n"
        if not self.breaks:
            yield from rest[1:]


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> list[str]:
    expect(page.locator("[aria-busy]")).to_have_count(0)
    return page.locator(".turn.assistant .text:first-of-type").all_inner_texts()


def ask(page: Page, text: str) -> str:
    """Sends a message; returns the text of the answer."""
    count = page.locator(".turn.assistant").count()
    send(page, text)
    expect(page.locator(".turn.assistant")).to_have_count(count + 1)
    return answers(page)[-1].strip()


# The conversation


def test_answer_comes_in_pieces_with_its_speed(page: Page, server: FakeServer) -> None:
    expect(page.locator("#model-name")).to_have_text("fake")
    server.answer = says("**bold**", " and `code`\n\n- one\n", "- two", usage=(1234, 3))
    send(page, "Hello")
    expect(page.locator(".stats")).to_contain_text("3 tokens")
    expect(page.locator(".stats")).to_contain_text("prompt 1,234 tokens")
    expect(page.locator(".text strong")).to_have_text("bold")
    expect(page.locator(".text li")).to_have_text(["one", "two"])
    body = server.bodies[-1]
    assert body["stream_options"] == {"include_usage": True}
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    assert (body["model"], body["stream"]) == ("fake", True)
    # What nobody has set is the server's to choose.
    assert set(body) == {"model", "stream", "stream_options", "messages"}


def test_speed_is_that_of_the_tokens_behind_the_first(page: Page) -> None:
    stats = page.evaluate(
        """async () => {
          const { Watch, statsWords } = await import("/static/stats.js");
          let now = 100;
          const watch = new Watch(() => now);
          for (const at of [600, 1100, 1600]) { now = at; watch.note({}, true); }
          now = 2100;
          watch.note({ usage: { prompt_tokens: 5, completion_tokens: 201 } }, false);
          return [watch.stats(), statsWords(watch.stats())];
        }"""
    )
    assert stats == [
        {"numTokens": 201, "numPromptTokens": 5, "firstS": 0.5, "totalS": 2, "perSecond": 200},
        ["200.0 tokens/s", "201 tokens", "first after 500 ms", "2.00 s in all", "prompt 5 tokens"],
    ]


def test_events_are_read_wherever_the_bytes_are_cut(page: Page) -> None:
    body = 'data: {"a":"é😀"}\r\n\r\n: note\n\ndata:two\ndata: lines\n\nid: 3\rdata: [DONE]\r\r'
    wrong = page.evaluate(
        """async (body) => {
          const { EventParser } = await import("/static/sse.js");
          const bytes = new TextEncoder().encode(body);
          const wanted = JSON.stringify(['{"a":"é😀"}', "two\\nlines", "[DONE]"]);
          const wrong = [];
          for (let first = 0; first <= bytes.length; first += 1) {
            for (let second = first; second <= bytes.length; second += 1) {
              const parser = new EventParser();
              const cuts = [[0, first], [first, second], [second, bytes.length]];
              const found = cuts.flatMap(([from, to]) => parser.feed(bytes.subarray(from, to)));
              if (JSON.stringify(found) !== wanted) wrong.push([first, second, found]);
            }
          }
          return wrong;
        }""",
        body,
    )
    assert wrong == []


def test_time_to_try_again_is_read_from_seconds_and_dates(page: Page) -> None:
    times = page.evaluate(
        """async () => {
          const { retryTime } = await import("/static/api.js");
          const headers = ["7", "Wed, 21 Oct 2015 07:28:00 GMT", "", null, "soon", "-3", "9999999"];
          return headers.map((header) => retryTime(header, 1000)?.getTime() ?? null);
        }"""
    )
    assert times == [8000, 1445412480000, None, None, None, None, None]


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_ends_the_answer_and_keeps_what_came(way: str, page: Page, server: FakeServer) -> None:
    server.answer = Held()
    send(page, "Go")
    expect(page.locator(".text")).to_have_text("first")
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".stats")).to_contain_text("stopped")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    assert server.cut.wait(15)  # the server need not go on
    server.answer = echo
    assert ask(page, "again") == "You said: again"
    assert [each["role"] for each in server.bodies[-1]["messages"]] == ["user", "assistant", "user"]
    assert server.bodies[-1]["messages"][1]["content"] == "first "


def test_edit_regenerate_delete_and_undo(page: Page, server: FakeServer) -> None:
    ask(page, "one")
    ask(page, "two")
    server.answer = says("Better.")
    page.get_by_role("button", name="Regenerate this answer").last.click()
    expect(page.locator(".turn.assistant .text").last).to_have_text("Better.")
    assert [each["content"] for each in server.bodies[-1]["messages"]] == [
        *("one", "You said: one", "two")
    ]

    server.answer = echo

    def edit_first(text: str) -> None:
        page.get_by_role("button", name="Edit this message").first.click()
        page.get_by_label("Your message").fill(text)
        page.keyboard.press("Enter")
        expect(page.locator(".turn")).to_have_count(2)
        assert answers(page) == [f"You said: {text}"]

    edit_first("eins")
    page.get_by_role("button", name="Undo").click()
    assert answers(page) == ["You said: one", "Better."]
    assert page.locator(".turn.user .body").all_inner_texts() == ["one", "two"]
    edit_first("uno")

    page.get_by_role("button", name="Edit this answer").click()
    page.get_by_label("The answer", exact=True).fill("No, *dos*.")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".text em")).to_have_text("dos")
    ask(page, "tres")
    assert server.bodies[-1]["messages"][1] == {"role": "assistant", "content": "No, *dos*."}

    page.get_by_role("button", name="Delete this message").first.click()
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".turn")).to_have_count(4)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_role("heading", name="Ask the model")).to_be_visible()


def test_turn_that_replaces_a_running_answer_stops_it(page: Page, server: FakeServer) -> None:
    server.answer = Held()
    send(page, "one")
    expect(page.locator(".text")).to_have_text("first")
    server.answer = echo
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_label("Your message").fill("two")
    page.keyboard.press("Enter")
    expect(page.locator(".text")).to_have_text("You said: two")
    assert [each["content"] for each in server.bodies[-1]["messages"]] == ["two"]


def test_reasoning_is_folded_and_tool_calls_are_json(page: Page, server: FakeServer) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": ' "Xi\'an"}'}}
    deltas: tuple[dict[str, Any], ...] = (
        {"reasoning_content": "Let me <b>see</b>."},
        {"content": "I ask."},
        {"tool_calls": [call]},
        {"tool_calls": [rest]},
    )
    server.answer = says(*deltas)
    send(page, "Weather?")
    expect(page.locator(".reasoning summary")).to_contain_text("Reasoned for")
    expect(page.get_by_text("Let me <b>see</b>.")).to_be_hidden()
    page.locator(".reasoning summary").click()
    expect(page.get_by_text("Let me <b>see</b>.")).to_be_visible()
    shown = page.locator(".call code").inner_text()
    assert json.loads(shown) == {"name": "weather", "arguments": {"city": "Xi'an"}}
    # Reasoning is not asked for again.
    server.answer = echo
    ask(page, "And?")
    assert server.bodies[-1]["messages"][1] == {"role": "assistant", "content": "I ask."}


def test_conversation_outlives_a_reload_and_not_the_tab(
    browser: Browser, page: Page, server: FakeServer
) -> None:
    ask(page, "Keep *this*")
    page.reload()
    assert answers(page) == ["You said: Keep this"]
    with visit(browser, server.url) as other:
        expect(other.locator(".turn")).to_have_count(0)


# Settings and the key


def test_settings_are_sent_and_kept(page: Page, server: FakeServer) -> None:
    page.get_by_role("button", name="Settings").click()
    texts = {
        "Temperature": "0.7", "Top p": "0.9", "Top k": "40", "Max tokens": "256", "Seed": "7",
        "Repetition penalty": "1.1", "Stop strings": "END\n\\n\\n", "System prompt": "Be brief.",
    }  # fmt: skip
    for label, text in texts.items():
        page.get_by_label(label, exact=True).fill(text)
    page.keyboard.press("Escape")
    ask(page, "Hello")
    body = server.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    sent = ("temperature", "top_p", "top_k", "max_tokens", "seed", "repetition_penalty")
    assert [body[name] for name in sent] == [0.7, 0.9, 40, 256, 7, 1.1]
    assert body["stop"] == ["END", "\n\n"]
    page.reload()
    page.get_by_role("button", name="Settings").click()
    for label, text in texts.items():
        expect(page.get_by_label(label, exact=True)).to_have_value(text)
    page.get_by_role("button", name="All defaults").click()
    page.keyboard.press("Escape")
    ask(page, "Hello")
    assert "temperature" not in server.bodies[-1]


def test_pictures_are_attached_shown_sent_and_kept(page: Page, server: FakeServer) -> None:
    server.answer = says("A pixel.")
    picture: Any = {"name": "a.png", "mimeType": "image/png", "buffer": PIXEL}
    other: Any = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"x"}
    page.locator("#pick").set_input_files([picture, other, picture])
    expect(page.locator("#attached img")).to_have_count(2)
    expect(page.locator("#notice")).to_contain_text("a.txt is no PNG")
    page.get_by_role("button", name="Remove picture 2").click()
    assert ask(page, "What is it?") == "A pixel."
    url = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
    ]
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": parts}]
    expect(page.locator("#attached img")).to_have_count(0)
    page.reload()
    shown = page.locator(".turn.user img")
    expect(shown).to_have_attribute("src", url)
    assert shown.evaluate("(image) => image.naturalWidth") == 1  # the page's policy shows it


def test_wrong_setting_is_named_and_nothing_is_sent(page: Page, server: FakeServer) -> None:
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_label("Top p", exact=True)
    field.fill("1.5")
    expect(page.locator("#set-top_p-error")).to_have_text("A number from 0 to 1.")
    assert field.get_attribute("aria-invalid") == "true"
    page.keyboard.press("Escape")
    send(page, "Hello")
    expect(field).to_be_focused()
    assert server.bodies == []
    field.fill("0.5")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(2)


def test_key_is_asked_for_and_stays_in_the_tab(browser: Browser) -> None:
    with (
        FakeServer(echo, api_key="sk-right", static=FILES) as server,
        visit(browser, server.url) as page,
    ):
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("This server asks for a key.")
        page.get_by_label("Key", exact=True).fill("sk-wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("The server did not take the key")
        page.get_by_label("Key", exact=True).fill("sk-right")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        assert ask(page, "Hello") == "You said: Hello"
        assert server.headers[-1]["Authorization"] == "Bearer sk-right"
        kept = page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage)]")
        assert "sk-right" in kept[0]
        assert "sk-right" not in kept[1]
        assert "sk-right" not in page.content()
        page.reload()
        expect(dialog).to_be_hidden()
        assert ask(page, "again") == "You said: again"
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Forget it").click()
        assert "sk-right" not in page.evaluate("JSON.stringify(sessionStorage)")


def test_key_that_is_refused_for_an_answer_is_asked_for_again(
    page: Page, server: FakeServer
) -> None:
    server.answer = fails(401, b'{"error": {"message": "wrong API key"}}')
    send(page, "Hello")
    expect(page.get_by_role("dialog", name="API key")).to_be_visible()
    server.answer = echo
    page.get_by_label("Key", exact=True).fill("sk-other")
    page.keyboard.press("Enter")
    expect(page.locator(".text")).to_have_text("You said: Hello")


# Errors


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            fails(429, b'{"error": {"message": "512 are waiting"}}', Retry_After="7"),
            ["The server has too much to do.", "512 are waiting", "It asks to try again at "],
        ),
        (
            fails(400, b'{"error": {"message": "max_tokens 9 is too many", "code": 400}}'),
            ["The server does not take this request.", "max_tokens 9 is too many"],
        ),
        (
            fails(422, b'{"detail": [{"msg": "Field required"}]}'),
            ["The server does not take this request.", "Field required"],
        ),
        (fails(404, b'{"error": {"message": "no model x"}}'), ["does not have this", "no model x"]),
        (fails(500, b"<html><b>Internal</b></html>"), ["The server failed."]),
        (fails(503, b"loading"), ["The server is not ready.", "loading"]),
        (fails(418, b""), ["The server answers with status 418."]),
        (
            lambda body: Answer(events({"error": {"message": "out of memory"}}, done=False)),
            ["The server could not finish the answer.", "out of memory"],
        ),
        (
            lambda body: Answer([b"data: {oops\n\n"]),
            ["The server sent something that is not JSON.", "{oops"],
        ),
    ],
)
def test_error_is_shown_in_plain_words_and_tried_again(
    answer: Answers, words: list[str], page: Page, server: FakeServer
) -> None:
    server.answer = answer
    send(page, "Hello")
    expect(page.get_by_role("alert").filter(has_text=words[-1])).to_be_visible()
    shown = page.locator(".turn.assistant").inner_text()
    assert [each for each in words if each not in shown] == []
    assert "<b>" not in shown
    server.answer = echo
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".text")).to_have_text("You said: Hello")
    expect(page.locator(".error")).to_have_count(0)
    assert len(server.bodies[-1]["messages"]) == 1


def test_answer_that_breaks_off_keeps_what_came(page: Page, server: FakeServer) -> None:
    server.answer = held = Held(breaks=True)
    send(page, "Hello")
    expect(page.locator(".text")).to_have_text("first")
    held.may_end.set()
    expect(page.get_by_role("alert")).to_contain_text("The connection ended before the answer did.")
    expect(page.locator(".text")).to_have_text("first")


def test_network_that_is_lost_is_said_and_the_message_stays(browser: Browser) -> None:
    with FakeServer(echo, static=FILES) as server:
        visited = visit(browser, server.url)
        page = visited.__enter__()
        expect(page.locator("#model-name")).to_be_visible()
    send(page, "Hello")
    expect(page.locator(".error")).to_contain_text("The server cannot be reached.")
    expect(page.locator(".turn.user")).to_have_text(re.compile("Hello"))
    visited.__exit__(None, None, None)


def test_message_behind_a_failed_answer_is_joined_to_the_one_ahead(
    page: Page, server: FakeServer
) -> None:
    server.answer = fails(500, b"")
    send(page, "one")
    expect(page.locator(".error")).to_be_visible()
    server.answer = echo
    ask(page, "two")
    # Many chat templates want the roles to take turns.
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "one\n\ntwo"}]


# Files


def test_export_is_taken_up_again_as_it_was(page: Page, server: FakeServer, tmp_path: Path) -> None:
    server.answer = says({"reasoning_content": "Hm."}, "1 < 2 & <i>\n\n```py\nx = 1\n```\n")
    send(page, "Hello")
    expect(page.locator(".code")).to_be_visible()
    shown = page.locator("#turns .text").inner_text()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["system"] == "Be brief."
    assert saved["messages"][1]["reasoning_content"] == "Hm."
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New chat").click()
    page.locator("#file").set_input_files(path)
    expect(page.locator(".turn")).to_have_count(2)
    assert page.locator("#turns .text").inner_text() == shown
    expect(page.locator("#notice")).to_contain_text("2 messages from conversation-")


def test_wrong_file_is_refused_whole(page: Page) -> None:
    ask(page, "Stays")
    page.get_by_role("button", name="Settings").click()
    cases = {
        "{": "The file is not JSON",
        "[]": 'The file has no list "messages".',
        '{"format": "x", "messages": []}': "The file's format is not regatta-conversation",
        '{"messages": [{"role": "user", "content": "a"}, {"role": "tool"}]}': (
            'Message 2 has the role "tool"; there are system, user and assistant.'
        ),
        '{"messages": [{"role": "user", "content": [1]}]}': "The content of message 1 is not text.",
        '{"messages": [null]}': "Message 1 has the role undefined",
        '{"messages": [], "system": 4}': "The file: system is not text.",
        '{"messages": [{"role": "assistant", "tool_calls": {}}]}': "tool_calls is not a list",
    }
    for text, words in cases.items():
        page.locator("#file").set_input_files(
            {"name": "c.json", "mimeType": "application/json", "buffer": text.encode()}
        )
        expect(page.locator("#import-error")).to_contain_text(words)
        expect(page.locator(".turn")).to_have_count(2)


# Keyboard, screen readers, looks


def test_everything_is_reached_and_used_by_keyboard(page: Page, server: FakeServer) -> None:
    text = page.get_by_label("Message", exact=True)
    expect(text).to_be_focused()
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    # An Enter that chooses a character of an input method sends nothing.
    page.evaluate(
        """document.activeElement.dispatchEvent(new KeyboardEvent(
          "keydown", { key: "Enter", isComposing: true, bubbles: true, cancelable: true }))"""
    )
    assert server.bodies == []
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .stats")).to_be_visible()
    assert server.bodies[-1]["messages"][0]["content"] == "a\nb"
    expect(text).to_be_focused()

    page.reload()
    expect(page.locator(".turn.assistant")).to_be_visible()
    expect(text).to_be_focused()
    names: list[str] = []
    while "Message" not in names and len(names) < 32:
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            continue  # behind the last: the browser's own buttons
        focused = page.evaluate(
            """() => {
              const at = document.activeElement;
              const box = getComputedStyle(at.closest("#composer") ?? at);
              const { outlineStyle } = getComputedStyle(at);
              const isSeen = box.boxShadow !== "none" || outlineStyle !== "none";
              return [at.labels?.[0]?.textContent || at.ariaLabel || at.textContent.trim(), isSeen];
            }"""
        )
        assert focused[1], f"the focus is not seen on {focused[0]}"
        names.append(focused[0])
    for name in ("Skip to the message box", "fake", "New chat", "Settings", "Dark theme"):
        assert name in names
    for name in ("Edit this message", "Regenerate this answer", "Delete this answer", "Send"):
        assert name in names

    page.get_by_role("link", name="Skip to the message box").press("Enter")
    expect(text).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Your message")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit this message")).to_be_focused()
    page.get_by_role("button", name="Settings").press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Settings")).to_be_focused()


def test_screen_reader_is_told_once_and_not_of_every_token(page: Page, server: FakeServer) -> None:
    page.evaluate(
        """() => {
          window.told = [];
          const live = document.querySelector("#live");
          const note = () => told.push(live.textContent);
          new MutationObserver(note).observe(live, { childList: true });
        }"""
    )
    server.answer = says(*(f"w{each} " for each in range(200)))
    send(page, "Hello")
    expect(page.locator(".stats")).to_be_visible()
    told = page.evaluate("told")
    assert len(told) == 2
    assert told[0] == "The model is answering."
    assert "w0 w1" in told[1]
    # Nothing around the growing text speaks by itself.
    assert (
        page.evaluate("document.querySelector('.text').closest('[aria-live], [role=log]')") is None
    )


CONTRAST = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paint = (colors) => {
    context.fillStyle = "#fff"; context.fillRect(0, 0, 1, 1);
    for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
  };
  const light = (colors) => {
    const [r, g, b] = paint(colors); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const poor = [];
  let count = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const holder = walker.currentNode.parentElement;
    const opaque = { checkOpacity: false, checkVisibilityCSS: true };
    if (!walker.currentNode.data.trim() || !holder.checkVisibility(opaque)) continue;
    const behind = [];
    for (let at = holder; at; at = at.parentElement) {
      behind.unshift(getComputedStyle(at).backgroundColor);
      if (at.matches("dialog")) break;
    }
    const pair = [light(behind), light([...behind, getComputedStyle(holder).color])];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    count += 1;
    if (ratio < 4.5) poor.push([holder.outerHTML.slice(0, 80), ratio]);
  }
  return [count, poor];
}"""
SAMPLE = """# A title
Text with *emphasis*, `code`, [a link](https://a.example/) and ![a picture](https://a.example/p.png).

> Quoted.

1. one
   - two

| a | b |
|--:|:-:|
| 1 | 2 |

```python
def f(x):  # comment
    return "string" + str(12)
```
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_aa_wants(
    scheme: str, browser: Browser, server: FakeServer
) -> None:
    options = {"color_scheme": scheme, "reduced_motion": "reduce"}
    with visit(browser, server.url, **options) as page:
        server.answer = says({"reasoning_content": "Hm."}, SAMPLE)
        send(page, "Hello")
        expect(page.locator(".stats")).to_be_visible()
        server.answer = fails(429, b"busy", Retry_After="3")
        send(page, "Hello")
        expect(page.locator(".error")).to_be_visible()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Seed", exact=True).fill("x")
        count, poor = page.evaluate(CONTRAST)
        assert poor == []
        assert count > 80
        # Who wants no motion gets none.
        assert page.evaluate("document.getAnimations().length") == 0


def test_theme_is_the_systems_until_one_is_chosen(browser: Browser, server: FakeServer) -> None:
    lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 128"
    with visit(browser, server.url, color_scheme="dark") as page:
        assert page.evaluate(lightness) is False
        toggle = page.get_by_role("button", name="Dark theme")
        expect(toggle).to_have_attribute("aria-pressed", "true")
        toggle.click()
        assert page.evaluate(lightness) is True
        page.reload()
        assert page.evaluate(lightness) is True


@pytest.mark.parametrize("width", [320, 390])
def test_narrow_screen_has_no_sideways_scrolling(
    width: int, browser: Browser, server: FakeServer
) -> None:
    with visit(browser, server.url, viewport={"width": width, "height": 640}) as page:
        server.answer = says(SAMPLE + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n")
        send(page, "z" * 300)
        expect(page.locator(".stats")).to_be_visible()
        overflow = """[document.documentElement, document.querySelector("main")]
            .map((each) => each.scrollWidth - each.clientWidth)"""
        assert page.evaluate(overflow) == [0, 0]
        page.get_by_role("button", name="Settings").click()
        assert page.evaluate("document.querySelector('#settings').scrollWidth") <= width


def test_end_stays_in_sight_until_the_reader_scrolls_up(page: Page, server: FakeServer) -> None:
    held = Held()
    held.deltas = ["line\n\n" * 80, "more\n\n" * 80]
    server.answer = held
    send(page, "Hello")
    expect(page.locator(".text p")).to_have_count(80)
    left = "(() => { const at = document.querySelector('main');"
    left += " return at.scrollHeight - at.clientHeight - at.scrollTop; })()"
    assert page.evaluate(left) < 2
    page.locator("main").hover()
    page.mouse.wheel(0, -400)
    expect(page.get_by_role("button", name="Latest")).to_be_visible()
    held.may_end.set()
    expect(page.locator(".text p")).to_have_count(160)
    assert page.evaluate(left) > 400
    page.get_by_role("button", name="Latest").click()
    assert page.evaluate(left) < 2


def test_code_is_copied_as_it_was_written(browser: Browser, server: FakeServer) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with visit(browser, server.url, permissions=permissions) as page:
        code = "if a < b:\n\tprint('&amp;')  # <b>\n"
        server.answer = says(f"```python\n{code}```\n")
        send(page, "Hello")
        button = page.get_by_role("button", name="Copy code, python")
        button.click()
        expect(button).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == code


# Files of the page


def test_page_works_where_scripts_may_make_no_html_at_all(
    browser: Browser, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = f"{openai_server.POLICY}; require-trusted-types-for 'script'; trusted-types 'none'"
    monkeypatch.setattr(openai_server, "POLICY", strict)
    with visit(browser, server.url) as page:
        assert ask(page, "**Hello**") == "You said: Hello"
        page.get_by_role("button", name="Settings").click()
        sent = "fetch('/').then((answer) => answer.headers.get('Content-Security-Policy'))"
        assert page.evaluate(sent) == strict


def test_page_names_no_other_host_and_has_nothing_inline() -> None:
    html = (FILES / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"\s(?:style|on\w+)\s*=", html) == []
    assert re.findall(r"<style|<script(?![^>]*\ssrc=)|javascript:|data:", html) == []
    for path in FILES.iterdir():
        hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text(encoding="utf-8")))
        assert hosts <= {"http://www.w3.org", "https://bank.example"}, path.name
    linked = re.findall(r'(?:src|href)="static/([\w.]+)"', html)
    assert [name for name in linked if not (FILES / name).is_file()] == []


def test_no_script_has_a_way_from_text_to_html_or_code() -> None:
    ways = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|DOMParser|srcdoc"
        r"|createContextualFragment|\beval\b|new Function|setAttribute\([\"']on|importScripts"
    )
    for path in FILES.glob("*.js"):
        assert ways.findall(path.read_text(encoding="utf-8")) == [], path.name


def test_every_file_is_in_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^predict = \[.*"server/page/\*"', project, re.MULTILINE)
    assert all(path.is_file() for path in FILES.iterdir())
