"""The chat page's Markdown in a browser: what it shows, and what hostile text never becomes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import chromium, visit
from tests.support.openai_server import Answer, FakeServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

FILES = Path(__file__).resolve().parents[2] / "predict" / "server" / "page"
# Shows pieces of a text; returns what it became, and what in it may not be there.
SHOW = """async ([pieces, eachTime]) => {
  const { MarkdownView } = await import("/static/markdown.js");
  const shown = document.body.appendChild(document.createElement("div"));
  const view = new MarkdownView(shown);
  for (const piece of pieces) { view.append(piece); if (eachTime) view.show(); }
  view.finish();
  const region = ["tabindex", "role", "aria-label"];
  const allowed = {
    a: ["href", "target", "rel", "title", "class"], button: ["type", "aria-label"],
    code: ["class"], div: ["class", ...region], li: ["class"], ol: ["start"], pre: region,
    span: ["class"], td: ["class"], th: ["class"],
  };
  const bare = "blockquote br del em h3 h4 h5 h6 hr p strong table tbody thead tr ul";
  for (const name of bare.split(" ")) allowed[name] = [];
  const wrong = [];
  for (const each of shown.querySelectorAll("*")) {
    const names = allowed[each.localName];
    if (!names) { wrong.push(each.localName); continue; }
    for (const { name } of each.attributes) {
      if (!names.includes(name)) wrong.push(`${each.localName} ${name}`);
    }
    if (each.localName !== "a") continue;
    if (!["http:", "https:", "mailto:"].includes(each.protocol)) wrong.push(each.href);
    if (each.rel !== "noopener noreferrer" || each.username) wrong.push(each.outerHTML);
    if (each.parentElement.closest("a")) wrong.push("a in a");
  }
  const html = shown.innerHTML;
  shown.remove();
  return [html, wrong];
}"""

Show = Callable[..., str]


@pytest.fixture(scope="module")
def renderer() -> Iterator[Page]:
    with (
        chromium() as browser,
        FakeServer(lambda body: Answer(), static=FILES) as server,
        visit(browser, server.url) as page,
    ):
        yield page


@pytest.fixture
def show(renderer: Page) -> Show:
    def shown(*pieces: str, each_time: bool = True) -> str:
        html, wrong = renderer.evaluate(SHOW, [list(pieces), each_time])
        assert wrong == []
        return str(html)

    return shown


def short(html: str) -> str:
    """HTML less what every link and every block of code has."""
    html = re.sub(r' target="_blank" rel="noopener noreferrer" title="[^"]*"', "", html)
    html = re.sub(
        r'<div class="code">.*?aria-label="Code, ([^"]*)"[^>]*><code>(.*?)</code></pre></div>',
        lambda found: f"[{found[1]}|{found[2]}]",
        html,
        flags=re.DOTALL,
    )
    return re.sub(
        r'<div class="table"[^>]*>(<table>.*?</table>)</div>', r"\1", html, flags=re.DOTALL
    )


CASES = [
    ("", ""),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    (
        "# A\n## B #\n####### no\n###### c",
        "<h3>A</h3><h4>B</h4><p>####### no</p><h6>c</h6>",
    ),
    ("a\n***\nb\n- - -\n", "<p>a</p><hr><p>b</p><hr>"),
    # Emphasis
    (
        "**b** *i* __b__ _i_ ~~s~~ ***bi***",
        "<p><strong>b</strong> <em>i</em> <strong>b</strong> <em>i</em> <del>s</del>"
        " <em><strong>bi</strong></em></p>",
    ),
    ("snake_case_name 2*3*4 a * b", "<p>snake_case_name 2<em>3</em>4 a * b</p>"),
    ("*a **b** c*", "<p><em>a <strong>b</strong> c</em></p>"),
    ("**中文。**中文", "<p><strong>中文。</strong>中文</p>"),
    ("~one~ ~~~~ \\*no\\*", "<p>~one~ ~~~~ *no*</p>"),
    # Code in a line
    ("`a*b*` ``x ` y`` `` ` `` `open",
     "<p><code>a*b*</code> <code>x ` y</code> <code>`</code> `open</p>"),
    ("\\``a`", "<p>`<code>a</code></p>"),
    ("`<b>&amp;`", "<p><code>&lt;b&gt;&amp;amp;</code></p>"),
    (r"\(a_1 * b_2\) and \[x*y*z\]", r'<p><code class="formula">\(a_1 * b_2\)</code> and '
     r'<code class="formula">\[x*y*z\]</code></p>'),
    # Links
    ("[t](https://a.example/x_(y))", '<p><a href="https://a.example/x_(y)">t</a></p>'),
    ("[*t*](<https://a.example/> 'title')!", '<p><a href="https://a.example/"><em>t</em></a>!</p>'),
    (
        "see https://a.example/p?q=1. (https://b.example/)",
        '<p>see <a href="https://a.example/p?q=1">https://a.example/p?q=1</a>. '
        '(<a href="https://b.example/">https://b.example/</a>)</p>',
    ),
    ("**https://a.example**",
     '<p><strong><a href="https://a.example/">https://a.example</a></strong></p>'),
    ("<me@a.example>", '<p><a href="mailto:me@a.example">me@a.example</a></p>'),
    ("![alt](https://a.example/p.png)",
     '<p><a href="https://a.example/p.png" class="image">alt</a></p>'),
    (
        "[![alt](https://a.example/p.png)](https://b.example/)",
        '<p><a href="https://b.example/"><span>alt</span></a></p>',
    ),
    ("[a [b](https://b.example/) c](https://c.example/)",
     '<p>[a <a href="https://b.example/">b</a> c](<a href="https://c.example/">https://c.example/</a>)</p>'),
    ("[t](docs/page.md) [t] [t](", "<p>[t](docs/page.md) [t] [t](</p>"),
    ("[t](javascript:alert(1))", "<p>[t](javascript:alert(1))</p>"),
    ("[t](https://bank.example@evil.example/)",
     "<p>[t](https://bank.example@evil.example/)</p>"),
    # HTML and entities are text
    ("<b>x</b> &lt;i&gt; &#65;&#x42; &nope; a<br>b",
     "<p>&lt;b&gt;x&lt;/b&gt; &lt;i&gt; AB &amp;nope; a<br>b</p>"),
    # Lists
    ("- a\n- b\n\ntext", "<ul><li><p>a</p></li><li><p>b</p></li></ul><p>text</p>"),
    ("3. a\n4. b\n* c",
     '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol><ul><li><p>c</p></li></ul>'),
    ("1. a\n  - b\n    - c\n  - d\n2. e",
     "<ol><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul></li>"
     "<li><p>e</p></li></ol>"),
    ("- a\nlazy\n\n  second\n\n- b",
     "<ul><li><p>a<br>lazy</p><p>second</p></li><li><p>b</p></li></ul>"),
    ("- [ ] a\n- [x] b",
     '<ul><li class="task"><p>☐ a</p></li><li class="task"><p>☑ b</p></li></ul>'),
    ("1. do\n\n   ```sh\n   ls\n   ```\n\n2. done",
     "<ol><li><p>do</p>[sh|ls\n]</li><li><p>done</p></li></ol>"),
    ("In the year\n1986. It was", "<p>In the year<br>1986. It was</p>"),
    ("text\n- a", "<p>text</p><ul><li><p>a</p></li></ul>"),
    # Quotes
    ("> a\n> > b\n>\n> - c\n\nd",
     "<blockquote><p>a</p><blockquote><p>b</p></blockquote><ul><li><p>c</p></li></ul></blockquote><p>d</p>"),
    # Code
    ("```\n<b>\n\n  x\n```\nafter", "[text|&lt;b&gt;\n\n  x\n]<p>after</p>"),
    ("~~~~ rust ignore\n```\n~~~\n~~~~", "[rust|```\n~~~\n]"),
    ("```py\nopen = 1", '[py|open = <span class="number">1</span>\n]'),
    ("```js\n/* a\nb */ if (x) 'y'\n```",
     '[js|<span class="comment">/* a\nb */</span> <span class="keyword">if</span> (x) '
     '<span class="string">\'y\'</span>\n]'),
    ("```rust\nfn f<'a>(x: &'a u8) { 'c' }\n```",
     "[rust|<span class=\"keyword\">fn</span> f&lt;'a&gt;(x: &amp;'a u8) { "
     "<span class=\"string\">'c'</span> }\n]"),
    ("text\n\n    def f():\n        pass\n\nend",
     "<p>text</p>[text|def f():\n    pass\n]<p>end</p>"),
    # Tables
    ("| a | b |\n|:--|--:|\n| `x\\|y` | **2** | extra |\n| only |\nafter",
     '<table><thead><tr><th class="start">a</th><th class="end">b</th></tr></thead><tbody>'
     '<tr><td class="start"><code>x|y</code></td><td class="end"><strong>2</strong></td></tr>'
     '<tr><td class="start">only</td><td class="end"></td></tr></tbody></table><p>after</p>'),
    ("text\na | b\n--|--\n1 | 2\n\n| no |",
     "<p>text</p><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td>"
     "</tr></tbody></table><p>| no |</p>"),
    ("a | b\n---\nc", "<p>a | b</p><hr><p>c</p>"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "html"), CASES)
def test_markdown_becomes(text: str, html: str, show: Show) -> None:
    assert short(show(text)) == html
    assert short(show(text.replace("\n", "\r\n"))) == html


def pieces_of(text: str, generator: random.Random) -> list[str]:
    cuts = sorted(generator.choices(range(len(text) + 1), k=min(len(text), 40)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_text_in_pieces_ends_as_the_same_text_at_once(show: Show) -> None:
    generator = random.Random(7)
    for text in ("\n\n".join(text for text, _ in CASES), "\n".join(text for text, _ in CASES)):
        whole = show(text, each_time=False)
        for _ in range(6):
            assert show(*pieces_of(text, generator)) == whole


ATTACKS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<style>@import 'https://evil.example/x.css';</style>",
    "<a href=javascript:alert(1)>x</a>",
    "<base href=https://evil.example/>",
    "<form action=https://evil.example/><input autofocus onfocus=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](&Tab;javascript:alert(1))",
    "[x](<javascript:alert(1)>)",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:msgbox)",
    "[x](//evil.example/)",
    "[x](https://evil.example/\" onmouseover=\"alert(1))",
    "[x](https://a.example \"t\" onclick=alert(1))",
    "![x](https://evil.example/track.png)",
    "![x](javascript:alert(1))",
    "![x](data:image/svg+xml,<svg onload=alert(1)>)",
    "<https://evil.example/\"onclick=alert(1)>",
    "<javascript:alert(1)>",
    "[![x](https://evil.example/a.png)](javascript:alert(1))",
    "```\"><script>alert(1)</script>\nx\n```",
    "```<img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```",
    "| <script> | b |\n|--|--|\n| <img src=x onerror=alert(1)> | [x](javascript:1) |",
    "`<script>`",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\u202ehttps://evil.example/\u202c",
    "# <h1 onclick=alert(1)>",
    "constructor __proto__ [toString](https://a.example/) &constructor; ```__proto__\nx\n```",
)  # fmt: skip
PARTS = (
    *ATTACKS, "\n", "\n\n", " ", "    ", "- ", "1. ", "> ", "|", "\n|--|--|\n", "*", "**", "_",
    "~~", "`", "```", "~~~", "[", "]", "](", "!", "![", "(", ")", "<", ">", "&", "\\", "\\(", "\\)",
    "$$", "#", "\t", "\r", "\0", "\ufffd", "\ud83d\ude00", "é", "中", "https://a.example/", "h",
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_text_stays_text(attack: str, show: Show) -> None:
    for text in (attack, f"**{attack}**", f"> - {attack}", f"[{attack}](https://a.example/)"):
        html = show(text)
        assert not re.search(r"<(script|img|svg|iframe|style|form|base|input)", html)


def test_any_mixture_becomes_nothing_but_the_allowed_nodes(show: Show) -> None:
    generator = random.Random(11)
    for _ in range(150):
        text = "".join(generator.choices(PARTS, k=generator.randint(1, 60)))
        streamed = show(*pieces_of(text, generator))
        assert streamed == show(text, each_time=False), repr(text)


@pytest.mark.parametrize("part", [
    "x", "*", "**a", "*a ", "_a_ ", "`", "`a``", "[", "![", "](", "[a](", "[a](b", "<", "&", "\\",
    "\\(", "$$", "> ", "- ", "| ", "|-", "#", "~~~ ` ", "h", "https://a.example/)", "( ", "``` ` ",
    " ", "\t", "\"'", "[a](https://a.example/ '", "a|\n",
])  # fmt: skip
def test_200_kb_of_anything_end_in_time(part: str, renderer: Page) -> None:
    text = (part * (200_000 // len(part) + 1))[:200_000]
    # A step that is quadratic in this takes minutes.
    done = renderer.wait_for_function(SHOW, arg=[[text], False], timeout=30_000)
    assert done.json_value()[1] == []


def test_cost_of_a_stream_grows_with_its_length_alone(renderer: Page) -> None:
    section = (
        "## Title\n\nText of *some* length.\n\n- one\n- two\n\n```py\nx = 1  # one\n```\n\n"
        "| a | b |\n|--|--|\n| 1 | 2 |\n\n"
    )
    renderer.evaluate(
        """() => {
          window.made = 0;
          const create = document.createElement;
          document.createElement = function (...all) { made += 1; return create.apply(this, all); };
        }"""
    )
    counts = []
    for text in (section * 20, section * 80):
        renderer.evaluate("made = 0")
        renderer.evaluate(SHOW, [[text[at : at + 5] for at in range(0, len(text), 5)], True])
        counts.append(renderer.evaluate("made"))
    assert counts[1] < 4.2 * counts[0]
