"""Chat templates that would never end, or take all memory; and the process that renders them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from predict.errors import UserError
from predict.text import template_process
from predict.text.chat_template import JinjaTemplate, PaddleTemplate
from predict.text.template_process import RenderError, TemplateProcess
from tests.support.limits import cpu_seconds

ASK = [{"role": "user", "content": "hello"}]
COUNT = "{% for i in range(99999) %}"
END = "{% endfor %}"


@pytest.fixture(scope="module")
def process() -> TemplateProcess:
    """One for all tests, as a limit must leave it usable."""
    return TemplateProcess()


def rendered(process: TemplateProcess, source: str) -> str:
    return process.render([(source, {"messages": ASK, "n": 3})])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (COUNT + COUNT + "{{ 'a' * 900 }}" + END + END, "prints more than 4194304 characters"),
        ("{{ 'a' * 10**10 }}", "512 MiB of memory"),
        ("{{ '%1000000000d' % n }}", "512 MiB of memory"),
        ("{{ 'a'|center(10**9) }}", "512 MiB of memory"),
        ("{{ ('a' * 10**4)|replace('a', 'b' * 10**5) }}", "512 MiB of memory"),
        ("{{ range(99999)|join('x' * 10**5) }}", "512 MiB of memory"),
        ("{{ [1]|batch(10**9, 0)|list }}", "512 MiB of memory"),
        (
            "{% set ns = namespace(x='a') %}" + COUNT + "{% set ns.x = ns.x + ns.x %}" + END,
            "512 MiB of memory",
        ),
    ],
)
def test_what_a_template_may_print_and_hold_is_limited(
    process: TemplateProcess, source: str, said: str
) -> None:
    with pytest.raises(RenderError, match=said) as raised:
        rendered(process, source)
    assert raised.value.kind == "limit"
    assert rendered(process, "{{ n }}") == "3"


@pytest.mark.parametrize(
    "source",
    [
        COUNT * 3 + END * 3,
        "{{ 3 ** (10 ** 8) }}",  # one C function, which no Python signal handler would interrupt
    ],
)
def test_a_template_that_never_ends_is_stopped(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(template_process, "CPU_SECONDS", 0.3)
    process = TemplateProcess()
    with pytest.raises(RenderError, match="CPU time"):
        rendered(process, source)
    assert rendered(process, "{{ n }}") == "3"


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{{ " + "not " * 30_000 + "1 }}",
    ],
)
def test_deep_nesting_fails_alone(process: TemplateProcess, source: str) -> None:
    with pytest.raises(RenderError, match="RecursionError") as raised:
        rendered(process, source)
    assert raised.value.kind == "failed"
    assert rendered(process, "{{ n }}") == "3"


def test_a_refusal_is_cut_short(process: TemplateProcess) -> None:
    with pytest.raises(RenderError) as raised:
        rendered(process, "{{ raise_exception('a' * 10**6) }}")
    assert raised.value.kind == "refused"
    assert len(str(raised.value)) == template_process.MAX_MESSAGE


def test_a_long_conversation_may_be_printed_whole(process: TemplateProcess) -> None:
    text = "word 🙂 " * 1_000_000
    assert process.render([("{{ t }}", {"t": text})]) == text


def test_limits_hold_for_all_parts_of_a_paddle_template_together() -> None:
    template = PaddleTemplate({"query": "{{ 'a' * 3000000 }}{{ 'a' * 3000000 }}"}, "the test")
    with pytest.raises(UserError, match=r"failed on .*prints more than"):
        template.render(ASK)
    with pytest.raises(UserError, match=r"failed on .*ZeroDivisionError"):
        PaddleTemplate({"query": "{{ 1 / 0 }}"}, "the test").render(ASK)


def test_a_huge_template_is_refused_unread() -> None:
    with pytest.raises(UserError, match=r"1048577 characters .allowed: 1048576"):
        JinjaTemplate("a" * ((1 << 20) + 1), {}, "the test")


def test_placeholders_are_found_in_linear_time() -> None:
    with cpu_seconds(20):
        PaddleTemplate({"query": "{{" * (1 << 18)}, "the test")


def test_a_process_that_was_killed_is_replaced(process: TemplateProcess) -> None:
    rendered(process, "{{ n }}")
    running = process._process
    assert running is not None
    running.kill()
    running.wait()
    assert rendered(process, "{{ n }}") == "3"


def test_threads_take_turns(process: TemplateProcess) -> None:
    answers: dict[int, str] = {}

    def render(index: int) -> None:
        for _ in range(20):
            answers[index] = process.render([("{{ i }}", {"i": index})])
            assert answers[index] == str(index)

    threads = [threading.Thread(target=render, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: str(i) for i in range(8)}


def test_a_forked_child_renders_in_its_own_process(process: TemplateProcess) -> None:
    rendered(process, "{{ n }}")
    with process._lock:  # held by a thread that the child has not
        child = os.fork()
        if child == 0:
            os._exit(0 if rendered(process, "{{ n + 1 }}") == "4" else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert rendered(process, "{{ n }}") == "3"


def test_the_process_ends_with_its_parent_however_that_ends() -> None:
    script = (
        "import sys, time\n"
        "from predict.text.template_process import TemplateProcess\n"
        "process = TemplateProcess()\n"
        "process.render([('a', {})])\n"
        "print(process._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = os.pidfd_open(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    ended, _, _ = select.select([worker], [], [], 60)
    os.close(worker)
    assert ended, "the worker outlives its parent"


def test_the_process_has_neither_files_nor_environment(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TEST", "1")
    own = TemplateProcess()
    rendered(own, "{{ n }}")
    assert own._process is not None
    folder = Path(f"/proc/{own._process.pid}")
    assert b"SECRET" not in (folder / "environ").read_bytes()
    limits = (folder / "limits").read_text().splitlines()
    sizes = {line[:26].strip(): line[26:].split()[:2] for line in limits}
    assert sizes["Max file size"] == ["0", "0"]
    assert sizes["Max address space"] == [str(512 << 20)] * 2


def test_without_a_process_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(UserError, match=r"/nowhere/python: No such file.*--chat_template none"):
        rendered(TemplateProcess(), "{{ n }}")
