"""The load tool: made-up times, loads on a clock of their own, HTTP on a fake server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predict.bench.compare import read_recorded
from predict.bench.serving.loads import Found, fixed, highest_load, poisson, send_at, send_in_flight
from predict.bench.serving.report import (
    METRICS,
    LatencyLimits,
    LoadReport,
    RequestRecord,
    load_rows,
    table,
)
from predict.bench.serving.workload import Ask, Lengths, asks_of_file, made_up, texts, token_ids
from predict.errors import UserError
from tests.support.openai_server import Answer, FakeServer, chat_events, events
from tests.support.virtual_time import run_virtually

serving = pytest.importorskip("predict.bench.serving.__main__")
client = pytest.importorskip("predict.bench.serving.client")


def record(
    *chunks: float, due: float = 0.0, end: float | None = None, **values: Any
) -> RequestRecord:
    """A request whose pieces came at these seconds, one token each."""
    values = {"num_output_tokens": len(chunks), **values}
    return RequestRecord(
        due_s=due, sent_s=due, chunk_s=chunks, end_s=chunks[-1] if end is None else end, **values
    )


def test_latencies_of_a_request_count_from_when_it_was_due() -> None:
    one = record(1.5, 1.7, 2.1, due=1.0, end=2.2)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.3)
    assert one.gaps_s == pytest.approx([0.2, 0.4])
    assert one.e2e_s == pytest.approx(1.2)
    assert record(1.0, 2.0, num_output_tokens=5).tpot_s == pytest.approx(0.25)
    assert record(1.0).tpot_s is None


def test_goodput_counts_whole_answers_within_every_limit() -> None:
    records = [
        record(0.1, 0.2),  # good
        record(0.6, 0.7),  # first token too late
        record(0.1, 0.4),  # then too slow
        record(0.1, 0.2, end=9.0),  # ends too late
        record(0.1, 0.2, error="a stream that broke off"),
    ]
    limits = LatencyLimits.parse(["ttft:500", "tpot:200", "e2e:5000"])
    report = LoadReport.of(2.0, records, limits)
    assert report.numbers["num_good"] == 1
    assert report.numbers["good_share"] == pytest.approx(0.2)
    assert report.numbers["goodput_requests_per_s"] == pytest.approx(1 / 9)
    assert report.numbers["requests_per_s"] == pytest.approx(4 / 9)
    assert report.errors == {"a stream that broke off": 1}
    assert "1 of 5 failed: 1 x a stream that broke off" in table([report], "requests/s")
    without = LoadReport.of(1.0, [record(50.0), record(1.0, error="status 500")], LatencyLimits())
    assert without.numbers["good_share"] == 0.5


def test_a_row_has_the_median_of_a_loads_runs_and_all_their_failures() -> None:
    runs = [
        LoadReport.of(load, [record(first), record(9.0, error="status 500")], LatencyLimits())
        for load, first in ((2.0, 0.1), (1.0, 5.0), (2.0, 0.3), (2.0, 0.4))
    ]
    first, second = load_rows(runs, "requests/s")
    assert (first["name"], second["name"]) == ("1 requests/s", "2 requests/s")
    assert second["values"]["ttft_p50_ms"] == pytest.approx(300.0)
    assert second["spread"]["ttft_p50_ms"]["n"] == 3
    assert second["errors"] == {"status 500": 3}


def test_an_answer_without_a_piece_has_no_first_token_in_time() -> None:
    empty = RequestRecord(due_s=0.0, sent_s=0.0, chunk_s=(), end_s=1.0)
    assert not LatencyLimits(ttft=1e6).hold(empty)
    assert LatencyLimits(tpot=1.0, e2e=1e6).hold(empty)


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    assert fixed(4.0, 5, (0,)) == [0.0, 0.25, 0.5, 0.75, 1.0]
    times = poisson(10.0, 20_000, (0, 1))
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(0.1, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.1, rel=0.03)  # exponential: as large as the mean
    assert poisson(10.0, 5, (0, 1)) == times[:5]
    assert poisson(10.0, 5, (0, 2)) != times[:5]


def test_requests_of_a_rate_do_not_wait_for_one_another() -> None:
    async def slow(ask: Ask, due: float) -> RequestRecord:
        sent = asyncio.get_running_loop().time()
        await asyncio.sleep(10.0)
        now = asyncio.get_running_loop().time()
        return RequestRecord(due_s=due, sent_s=sent, chunk_s=(now,), end_s=now)

    records = run_virtually(send_at(slow, [Ask("a", 1)] * 5, fixed(2.0, 5, (0,))))
    assert [one.due_s for one in records] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert [one.sent_s for one in records] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert [one.end_s for one in records] == [10.0, 10.5, 11.0, 11.5, 12.0]
    assert LoadReport.of(2.0, records, LatencyLimits()).numbers["requests_per_s"] == 5 / 12


def test_concurrency_keeps_as_many_requests_in_flight() -> None:
    in_flight: list[int] = []
    now_running = 0

    async def send(ask: Ask, due: float) -> RequestRecord:
        nonlocal now_running
        now_running += 1
        in_flight.append(now_running)
        await asyncio.sleep(ask.max_tokens)
        now_running -= 1
        end = asyncio.get_running_loop().time()
        return RequestRecord(due_s=due, sent_s=due, chunk_s=(end,), end_s=end)

    asks = [Ask(str(number), 1 + number % 3) for number in range(30)]
    records = run_virtually(send_in_flight(send, asks, 4))
    assert len(records) == 30
    assert max(in_flight) == 4
    assert in_flight[3:] == [4] * 27
    assert [round(one.e2e_s) for one in records] == [ask.max_tokens for ask in asks]


def found(capacity: float, start: float, **values: Any) -> tuple[Found, list[float]]:
    """What a sweep finds where loads up to `capacity` hold, and the loads that it measured."""
    tried: list[float] = []

    async def holds(load: float) -> bool:
        tried.append(load)
        return load <= capacity

    settings: dict[str, Any] = {"most": 1024.0, "resolution": 0.05, "whole": False} | values
    return asyncio.run(highest_load(holds, start, **settings)), tried


@given(st.floats(0.01, 1000.0), st.floats(0.1, 100.0), st.floats(0.01, 0.5))
def test_a_sweep_encloses_the_capacity(capacity: float, start: float, resolution: float) -> None:
    result, tried = found(capacity, start, resolution=resolution)
    if result.highest is None:
        assert capacity < start / 1000
    elif result.lowest_failed is None:
        assert capacity >= 1024.0
    else:
        assert result.highest <= capacity < result.lowest_failed
        assert result.lowest_failed <= result.highest * (1 + resolution) + 1e-9
    assert len(tried) == len(set(tried))


@given(st.integers(1, 300), st.integers(1, 64))
def test_a_sweep_of_requests_in_flight_measures_whole_numbers(capacity: int, start: int) -> None:
    result, tried = found(capacity, start, whole=True, resolution=0.001, most=256)
    assert all(load == round(load) for load in tried)
    assert result.highest == min(capacity, 256)
    assert result.lowest_failed == (capacity + 1 if capacity < 256 else None)


def test_a_sweep_says_when_no_load_or_every_load_holds() -> None:
    assert found(0.0, 8.0)[0].highest is None
    assert found(1e9, 8.0)[0] == Found(1024.0, None)


def test_made_up_prompts_have_their_lengths_and_groups_begin_alike() -> None:
    lengths = Lengths(100, 20, 0.0, prefix_len=60, num_prefixes=3)
    asks = made_up(token_ids(1000), lengths, 9, (0, 1))
    prompts = [ask.prompt for ask in asks]
    assert all(isinstance(prompt, list) and len(prompt) == 100 for prompt in prompts)
    assert {ask.max_tokens for ask in asks} == {20}
    for one in range(9):
        for other in range(one):
            same = prompts[one][:60] == prompts[other][:60]
            assert same == ((one - other) % 3 == 0)
            assert prompts[one][60:] != prompts[other][60:]
    again = made_up(token_ids(1000), lengths, 9, (0, 1))
    assert again == asks
    assert made_up(token_ids(1000), lengths, 9, (0, 2)) != asks


def test_a_spread_draws_lengths_on_both_sides() -> None:
    asks = made_up(token_ids(10), Lengths(100, 50, 0.5), 300, (0,))
    sizes = [len(ask.prompt) for ask in asks]
    assert 50 <= min(sizes) < 60
    assert 140 < max(sizes) <= 150
    assert 25 <= min(ask.max_tokens for ask in asks) < 30


def test_words_are_as_many_as_the_server_counts_tokens() -> None:
    maker = texts((8, 30), (40, 110))  # 2.5 tokens a word and 10 of a template
    ask = made_up(maker, Lengths(60, 4, 0.0), 1, (0,))[0]
    assert isinstance(ask.prompt, str)
    assert len(ask.prompt.split()) == 20
    assert len(str(maker(np.random.default_rng(0), 3)).split()) == 1
    with pytest.raises(UserError, match="--vocab_size"):
        texts((8, 30), (40, 30))


def test_lines_of_a_file_keep_their_sampling_keys(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"src": "one", "max_new_tokens": 3, "temperature": 0.5}\n{"src": "two"}\n')
    asks = asks_of_file(path, False, 16)
    assert asks == [Ask("one", 3, {"temperature": 0.5}), Ask("two", 16)]
    chat = asks_of_file(path, True, 16)
    assert chat[1].prompt == [{"role": "user", "content": "two"}]


def scripted(body: dict[str, Any]) -> Answer:
    """Answers as a server does whose words have two tokens, and templates five."""
    prompt = body.get("prompt", body.get("messages", [{}])[-1].get("content"))
    num_prompt = 5 + 2 * len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    count = body["max_tokens"]
    if not body.get("stream"):
        usage = {"prompt_tokens": num_prompt, "completion_tokens": count}
        return Answer([json.dumps({"choices": [], "usage": usage}).encode()])
    if "messages" in body:
        return Answer(chat_events(["x"] * count, (num_prompt, count)))
    values = [{"choices": [{"index": 0, "text": "x", "finish_reason": None}]}] * count
    values.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    usage = {"prompt_tokens": num_prompt, "completion_tokens": count}
    return Answer(events(*values, {"choices": [], "usage": usage}))


def run(server: FakeServer, *arguments: str) -> int:
    code: int = serving.main(["--base_url", f"{server.url}/v1", *arguments])
    return code


def numbers(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.parametrize("arrival", ["poisson", "fixed", "concurrency"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_load_is_measured_over_http(arrival: str, endpoint: str, tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    words = ["--arrival", arrival, "--load", "20,40" if arrival != "concurrency" else "1,4"]
    words += ["--num_requests", "6", "--input_len", "25", "--output_len", "3"]
    with FakeServer(scripted) as server:
        code = run(server, *words, "--endpoint", endpoint, "--output_file", str(path))
    assert code == 0
    found = numbers(path)
    assert found["settings"]["model"] == "fake"
    assert len(found["suites"]["serving"]["rows"]) == 2
    for row in found["suites"]["serving"]["rows"]:
        values = row["values"]
        assert values["num_input_tokens"] == 6 * 25  # ten words of two tokens, and the template
        assert values["num_output_tokens"] == 6 * 3
        assert values["num_requests"] == values["num_good"] == 6
        assert values.keys() >= METRICS.keys()
    sent = [body for body in server.bodies if body.get("stream")]
    assert len(sent) == 13  # a warm-up, too
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 for body in sent)


def test_the_file_is_one_that_compare_reads(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    words = ["--load", "40,20", "--num_requests", "3", "--repetitions", "2", "--warm_up", "0"]
    words += ["--vocab_size", "50", "--input_len", "4", "--output_len", "3"]
    words += ["--extra_body", '{"temperature": 0}', "--ignore_eos", "false", "--model", "m"]
    words += ["--device_name", "a GPU", "--api_key=secret", "--api-key", "secret"]
    with FakeServer(scripted, api_key="secret") as server:
        assert run(server, *words, "--output_file", str(path)) == 0
    assert "secret" not in path.read_text()
    found = read_recorded(path)
    assert found.device["name"] == "a GPU"
    assert list(found.cases) == ["serving: 20 requests/s", "serving: 40 requests/s"]
    for case in found.cases.values():
        assert {name: number.n for name, number in case.items()} == dict.fromkeys(METRICS, 2)
    prompts = [str(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) == 12
    assert {len(body["prompt"]) for body in server.bodies} == {4}
    assert all(body["temperature"] == 0 and body["model"] == "m" for body in server.bodies)
    assert not any("ignore_eos" in body for body in server.bodies)


def test_loads_that_were_measured_are_written_though_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.json"

    async def interrupted(plan: Any, into: Any) -> None:
        into.model = "fake"
        into.reports.append(LoadReport.of(1.0, [record(0.1, 0.2)], LatencyLimits()))
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "run", interrupted)
    assert serving.main(["--output_file", str(path)]) > 128
    assert [row["name"] for row in numbers(path)["suites"]["serving"]["rows"]] == ["1 requests/s"]
    assert "E2E" in capsys.readouterr().out


def test_a_client_that_falls_behind_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    plan = serving.parse(["--arrival", "fixed", "--num_requests", "3", "--warm_up", "0"])

    async def late(ask: Ask, due: float) -> RequestRecord:
        return RequestRecord(due_s=due, sent_s=due + 0.5, chunk_s=(due + 1,), end_s=due + 1)

    asks = lambda count, number: [Ask("a", 1)] * count  # noqa: E731
    run_virtually(serving.measure(plan, late, asks, serving.Measured()))
    assert "up to 500 ms late" in capsys.readouterr().err


CUT = events({"choices": [{"text": "x", "finish_reason": None}]}, done=False)
FAILURES = [
    ("status 503", Answer([b'{"error": {"message": "no"}}'], status=503)),
    ("an error in the stream", Answer(events({"error": {"message": "it died"}}, done=False))),
    ("an event that is no JSON", Answer([b"data: {\n\n"])),
    ("a stream that broke off", Answer(CUT, breaks=True)),
    ("a stream that broke off", Answer(CUT)),  # it closed well, without an end
]


@pytest.mark.parametrize(("kind", "answer"), FAILURES)
def test_failed_requests_are_counted_by_kind(kind: str, answer: Answer, tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    number = iter(range(100))

    def every_other(body: dict[str, Any]) -> Answer:
        return answer if next(number) % 2 else scripted(body)

    words = ["--arrival", "concurrency", "--vocab_size", "9", "--num_requests", "6"]
    words += ["--warm_up", "0", "--limits", "e2e:600000", "--output_file", str(path)]
    with FakeServer(every_other) as server:
        assert run(server, *words) == 1
    row = numbers(path)["suites"]["serving"]["rows"][0]
    assert row["errors"] == {kind: 3}
    assert (row["values"]["num_good"], row["values"]["good_share"]) == (3, 0.5)


def test_no_server_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["--base_url", "http://127.0.0.1:9/v1"]) == 1
    assert "cannot be asked" in capsys.readouterr().err


def test_a_sweep_over_virtual_servers_finds_their_capacity() -> None:
    """One request at a time, 0.1 s each: above 10 requests/s the queue grows."""
    words = ["--arrival", "fixed", "--num_requests", "200", "--warm_up", "0", "--sweep"]
    plan = serving.parse([*words, "--limits", "ttft:500", "--resolution", "0.02"])
    measured = serving.Measured()

    async def measure() -> None:
        turn = asyncio.Lock()

        async def send(ask: Ask, due: float) -> RequestRecord:
            loop = asyncio.get_running_loop()
            sent = loop.time()
            async with turn:
                await asyncio.sleep(0.1)
            now = loop.time()
            return RequestRecord(due_s=due, sent_s=sent, chunk_s=(now,), end_s=now)

        asks = lambda count, number: [Ask("a", 1)] * count  # noqa: E731
        await serving.measure(plan, send, asks, measured)

    run_virtually(measure())
    # Of 200 requests the last waits 200 * (0.1 - 1 / rate) and 0.1 s more: 500 ms at 10.2/s.
    assert measured.found.highest == pytest.approx(10.2, rel=0.03)
    line = serving.sweep_line(measured.found, plan.unit)
    assert line.startswith("highest load that held the limits: 10")
    assert measured.reports[0].load == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep"], "--sweep needs --limits"),
        (["--load", "0"], "allowed: numbers above 0"),
        (["--limits", "tft:500"], "did you mean ttft"),
        (["--limits", "ttft"], "'ttft' is not supported"),
        (["--limits", "e2e:nan,ttft:-1"], "allowed: numbers above 0"),
        (["--arrival", "concurrency", "--load", "1.5"], "whole numbers"),
        (["--arrival", "concurrency", "--seconds", "5"], "--seconds needs a rate"),
        (["--seconds", "5", "--num_requests", "5"], "leave one out"),
        (["--sweep", "--limits", "ttft:1", "--repetitions", "2"], "measured once"),
        (["--workload", "file"], "go together"),
        (["--vocab_size", "9", "--endpoint", "chat"], "--endpoint completions"),
        (["--prefix_len", "9"], "of --workload shared_prefix"),
        (["--lode", "9"], "did you mean --load"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        serving.parse(words)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[bench]'")
    path = tmp_path / "latency.png"
    words = ["--load", "20,40", "--num_requests", "3", "--vocab_size", "9", "--warm_up", "0"]
    with FakeServer(scripted) as server:
        assert run(server, *words, "--limits", "ttft:300", "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
