"""predictor.py from the outside, with a stand-in for the model."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from predict.cli import data
from predict.cli.work import result_line
from predict.config.engine import EngineConfig
from predict.errors import UserError
from predict.predictor import main
from predict.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams
from predict.text.tokenizer import Tokenizer
from tests.support.paths import DEMO, ROOT
from tests.support.processes import run_python
from tests.support.tiny import TOKENIZER as MODEL

SCRIPT = ROOT / "predict" / "predictor.py"


class FakeLLM:
    """Answers a prompt with its own text, upside down; finishes the last prompt first."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        before: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config
        self.spec = SimpleNamespace(vocab_size=340)
        self.tokenizer = tokenizer or (
            Tokenizer.from_dir(config.model.model_name_or_path, config.model.chat_template)
            if Tokenizer.exists(config.model.model_name_or_path)
            else None
        )
        self.startup_seconds = 0.5
        self.before = before or (lambda index: None)
        self.calls: list[tuple[Sequence[Sequence[int]], Sequence[SamplingParams]]] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_output: Callable[[int, RequestOutput], None] | None = None,
        on_step: Callable[[int, int], None] | None = None,
        skip: Container[int] = (),
    ) -> list[RequestOutput]:
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        self.calls.append((prompts, every))
        outputs: dict[int, RequestOutput] = {}
        for index in reversed(range(len(prompts))):
            if index in skip:
                continue
            self.before(index)
            prompt, own = prompts[index], every[index]
            count = own.max_new_tokens or len(prompt)
            ids = tuple(reversed(prompt))[:count]
            if own.ignore_eos:
                ids = tuple(prompt[i % len(prompt)] for i in range(count))
            text = self.tokenizer.decode(ids) if self.tokenizer else ""
            now = time.perf_counter()
            times = tuple(now + 0.01 * i for i in range(1, len(ids) + 1))
            metrics = RequestMetrics(now, now, times, times[-1])
            outputs[index] = RequestOutput(index, tuple(prompt), ids, text, "length", metrics)
            if on_output:
                on_output(index, outputs[index])
            if on_step:
                on_step(len(prompt), len(ids))
        return [outputs[index] for index in sorted(outputs)]

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(peak_memory_bytes=3 * 2**30)


class Runs:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.output = folder / "out.json"
        self.capsys = capsys
        self.llm: FakeLLM | None = None
        self.out = self.err = ""

    def __call__(
        self,
        *words: str,
        model: Path = MODEL,
        src: Sequence[Any] | None = ("hello", "world", "you"),
        make: Callable[[EngineConfig, Tokenizer | None], Any] | None = None,
        template: str = "none",
    ) -> int:
        def make_llm(config: EngineConfig, tokenizer: Tokenizer | None) -> Any:
            self.llm = (make or FakeLLM)(config, tokenizer)
            return self.llm

        argv = ["--model_name_or_path", str(model), "--dtype", "float32", "--device", "cpu"]
        argv += ["--output_file", str(self.output), "--chat_template", template]
        if src is not None:
            path = self.folder / "prompts.jsonl"
            path.write_text("".join(json.dumps({"src": s, "tgt": "t"}) + "\n" for s in src))
            argv += ["--data_file", str(path)]
        status = main([*argv, *words], make_llm=make_llm)
        self.out, self.err = self.capsys.readouterr()
        return status

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runs:
    return Runs(tmp_path, capsys)


def test_results_are_json_lines_in_input_order(run: Runs) -> None:
    assert run() == 0
    tokenizer = Tokenizer.from_dir(MODEL)
    backwards = [tokenizer.decode(tokenizer.encode(s)[::-1]) for s in ("hello", "world", "you")]
    assert run.results == [
        {"src": src, "tgt": "t", "output": output}
        for src, output in zip(("hello", "world", "you"), backwards, strict=True)
    ]
    assert "3 of 3 results are in" in run.err
    assert "tokens/s" in run.err


def test_the_console_shows_paddlenlps_banners_in_order(run: Runs) -> None:
    run(src=["hello"])
    (result,) = run.results
    assert run.out.splitlines() == [
        "***********Source**********",
        "hello",
        "***********Target**********",
        "t",
        "***********Output**********",
        result["output"],
    ]


def test_a_pipe_gets_no_progress_bar(run: Runs) -> None:
    run()
    assert "\r" not in run.err
    assert "%|" not in run.err


def test_without_a_data_file_the_built_in_prompt_runs(run: Runs) -> None:
    assert run("--batch_size", "2", src=None) == 0
    assert [result["src"] for result in run.results] == [data.BUILT_IN_PROMPT] * 2


def test_a_prompt_s_own_keys_hold_for_it_alone(run: Runs) -> None:
    lines = [
        {"src": "a", "top_k": 0, "temperature": 0.5, "bad_words": ["x", [5, 6]], "note": "mine"},
        {"src": "b"},
    ]
    file = run.folder / "own.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--top_p", "0.9", "--logit_bias", '{"7": -2.5}', "--no_repeat_ngram_size", "3"]
    assert run(*flags, "--data_file", str(file), model=DEMO, src=None) == 0
    assert run.llm is not None
    first, second = run.llm.calls[0][1]
    assert (first.temperature, first.top_k, second.temperature, second.top_k) == (0.5, 0, 1.0, 1)
    assert (5, 6) in first.bad_words
    assert len(first.bad_words) > 1
    assert all(isinstance(word, tuple) for word in first.bad_words)
    for params in (first, second):
        assert params.top_p == 0.9
        assert params.logit_bias == {7: -2.5}
        assert params.no_repeat_ngram_size == 3


def test_conversations_go_through_the_chat_template(run: Runs) -> None:
    src = [["hello", "there"]]
    assert run(template=str(MODEL), src=[[["hello", "there"], ["you"]]]) == 0
    assert run.results[0]["src"] == [*src, ["you"]]
    assert run.llm is not None
    assert run.llm.tokenizer is not None
    text = run.llm.tokenizer.decode(run.llm.calls[0][0][0], skip_special_tokens=False)
    assert text.startswith("<|user|>user\nhello<|end|>\n<|user|>assistant\nthere<|end|>")


def test_a_long_prompt_is_cut_with_a_warning(run: Runs) -> None:
    assert run("--src_length", "2", src=["hello world", "you"]) == 0
    assert run.err.count("warning:") == 1
    assert "line 1 of prompts.jsonl" in run.err
    assert run.llm is not None
    assert len(run.llm.calls[0][0][0]) == 2


def never(config: EngineConfig, tokenizer: Tokenizer | None) -> Any:
    raise AssertionError("the model must not be loaded")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quant_type", "a8w9"], "did you mean a8w8"),
        (["--max_length", "2"], "--max_length 2 counts prompt and output together"),
        (["--data_file", "/no/such/file"], "cannot read --data_file"),
        (["--chat_template", "/no/such/file"], "neither a file nor a folder"),
        (["--model_name_or_path", "a/b"], "not downloaded"),
        (["--model_name_or_path", str(ROOT / "tests")], "has no tokenizer"),
        (["--dtype", "float64"], "allowed: float32"),
        (["--bad_words", '"word"'], "allowed: a sequence of words"),
        (["--typical_p", "0"], "typical_p 0.0 is not supported"),
        (["--lora_modules", "a=/no/such/folder"], "/no/such/folder is no folder"),
        (["--lora_modules", "a=x", "b"], "'b' is not a name and a folder, as name=path"),
        (["--lora_modules", "a=x", "a=y"], "lora_modules names two adapters 'a'"),
        (["--max_loras", "0"], "0 is not supported (allowed: a whole number from 1 to 4096)"),
        (
            ["--model_name_or_path", str(DEMO), "--bad_words", "[[5], [1, 99999]]"],
            "bad_words has token id 99999, which is outside the vocabulary",
        ),
    ],
)
def test_wrong_input_is_one_paragraph_before_anything_is_loaded(
    run: Runs, words: list[str], said: str
) -> None:
    run.output.write_text("the last run's results\n")
    assert run(*words, make=never) == 2
    assert said in run.err
    lines = [line for line in run.err.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert run.output.read_text() == "the last run's results\n"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("the weights are cut short"), 2, "error: the weights are cut short\n"),
        (ValueError("block 7 is gone"), 1, "error: block 7 is gone (set REGATTA_TRACEBACK=1"),
        (KeyError("x"), 1, "error: KeyError: 'x'"),
        (MemoryError(), 1, "error: MemoryError: no further detail"),
        (KeyboardInterrupt(), 130, "interrupted: no prompt was finished\n"),
    ],
)
def test_a_model_that_does_not_load_is_one_line(
    run: Runs, error: BaseException, status: int, said: str
) -> None:
    def broken(config: EngineConfig, tokenizer: Tokenizer | None) -> Any:
        raise error

    assert run(make=broken) == status
    assert said in run.err
    assert "Traceback" not in run.err
    assert not run.output.exists()


def before(
    index: int, act: Callable[[], None]
) -> Callable[[EngineConfig, Tokenizer | None], FakeLLM]:
    """A model that does something before a prompt."""

    def on(current: int) -> None:
        if current == index:
            act()

    return lambda config, tokenizer: FakeLLM(config, tokenizer, on)


def stopping_before(index: int, error: BaseException) -> Any:
    return before(index, raising(error))


def kept(run: Runs) -> list[str]:
    """The prompts whose answers the journal holds, in the order in which they came."""
    path = run.output.with_name("out.json.journal")
    return [json.loads(line)["result"]["src"] for line in path.read_text().splitlines()[1:]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_behind_the_step_and_keeps_what_is_finished(
    run: Runs, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    handler = signal.signal(number, signal.SIG_DFL)  # whoever started pytest may ignore it
    request.addfinalizer(lambda: signal.signal(number, handler))
    run.output.write_text("the last run's results\n")
    assert run(make=before(1, lambda: signal.raise_signal(number))) == 128 + number
    assert kept(run) == ["you", "world"]  # the one that ran ended first
    assert run.err == (
        f"interrupted: 2 of 3 results are kept in {run.output}.journal; the same command with "
        "--resume goes on\n"
    )
    assert run.output.read_text() == "the last run's results\n"
    assert not list(run.folder.glob(".*.lock"))


def test_a_signal_in_the_last_step_does_not_stop_a_run_that_is_done(run: Runs) -> None:
    assert run(make=before(0, lambda: signal.raise_signal(signal.SIGTERM))) == 0
    assert len(run.results) == 3
    assert not Path(f"{run.output}.journal").exists()


def test_an_interrupted_run_goes_on_with_resume(run: Runs) -> None:
    assert run() == 0
    whole = run.output.read_bytes()
    run.output.unlink()
    assert run(make=stopping_before(0, KeyboardInterrupt())) == 130
    assert not run.output.exists()
    answered: list[int] = []
    assert (
        run("--resume", make=lambda config, tokenizer: FakeLLM(config, tokenizer, answered.append))
        == 0
    )
    assert answered == [0]
    assert "note: 2 of 3 results are kept in" in run.err
    assert "1 prompts run" in run.err
    assert run.output.read_bytes() == whole
    assert "world" not in run.out  # printed by the first run, if at all
    assert not Path(f"{run.output}.journal").exists()


def test_a_run_whose_answers_are_all_there_needs_no_model(run: Runs) -> None:
    assert run() == 0
    whole = run.output.read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("predict.cli.results.write_whole", raising(OSError(28, "No space left")))
        assert run() == 1
    assert "No space left" in run.err
    assert "3 of 3 results are kept in" in run.err
    assert run("--resume", make=never) == 0
    assert run.output.read_bytes() == whole


def raising(error: BaseException) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--temperature", "0.5"), "--temperature was 1.0 and is 0.5"),
        (("--max_new_tokens", "3"), "--max_new_tokens was null and is 3"),
        (("--seed", "7"), "--seed was 0 and is 7"),
        (("--chat_template", str(MODEL)), "tokenizer or its chat template changed"),
    ],
)
def test_only_the_same_run_is_resumed(run: Runs, words: tuple[str, ...], said: str) -> None:
    assert run(make=stopping_before(0, KeyboardInterrupt())) == 130
    assert run("--resume", *words, make=never) == 2
    assert said in run.err
    assert kept(run) == ["you", "world"]
    assert run("--resume", "--batch_size", "3") == 0  # which no answer depends on


def test_another_data_file_or_model_is_not_resumed(run: Runs, tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    assert run(make=stopping_before(0, KeyboardInterrupt()), model=model) == 130
    assert run("--resume", src=("hello", "world", "me"), make=never, model=model) == 2
    assert "the prompts of --data_file changed" in run.err
    assert "model_name_or_path changed" not in run.err
    (model / "model.safetensors").write_bytes(b"other weights")
    assert run("--resume", make=never, model=model) == 2
    assert "the content of --model_name_or_path changed" in run.err
    (model / "model.safetensors").unlink()
    assert run("--resume", model=model) == 0


def test_a_run_with_other_adapters_is_not_resumed(run: Runs, tmp_path: Path) -> None:
    for name in ("sql", "chat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())
    modules = [f"{name}={tmp_path / name}" for name in ("sql", "chat")]
    assert run("--lora_modules", *modules, make=stopping_before(0, KeyboardInterrupt())) == 130
    words = ("--resume", "--lora_modules")
    assert run(*words, modules[0], make=never) == 2
    assert "the content of adapter chat changed" in run.err
    assert run(*words, f"sql={tmp_path / 'chat'}", modules[1], make=never) == 2
    assert "the content of adapter sql changed" in run.err
    (tmp_path / "sql").rename(tmp_path / "moved")
    moved = f"sql={tmp_path / 'moved'}"
    (tmp_path / "moved" / "adapter_model.safetensors").write_bytes(b"lqs")
    assert run(*words, moved, modules[1], make=never) == 2
    (tmp_path / "moved" / "adapter_model.safetensors").write_bytes(b"sql")
    assert run(*words, moved, modules[1], "--max_loras", "3", "--max_cpu_loras", "1") == 0


def test_no_result_lies_in_an_adapter_s_folder(run: Runs, tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    words = ("--lora_modules", f"sql={tmp_path / 'sql'}")
    assert run(*words, "--output_file", str(tmp_path / "sql" / "out.json"), make=never) == 2
    assert "lies in the folder of --lora_modules sql" in run.err


def test_resume_without_a_journal_runs_everything_and_says_so(run: Runs) -> None:
    assert run("--resume") == 0
    assert f"there is no {run.output}.journal; all 3 prompts run" in run.err
    assert run("--resume") == 0
    assert "a finished run leaves none" in run.err
    assert len(run.results) == 3


def test_an_error_in_the_middle_keeps_the_finished_answers(run: Runs) -> None:
    assert run(make=stopping_before(1, RuntimeError("a kernel failed"))) == 1
    assert kept(run) == ["you"]
    assert "stopped: 1 of 3 results are kept in" in run.err
    assert "error: RuntimeError: a kernel failed" in run.err


def test_a_full_disk_loses_nothing(run: Runs) -> None:
    assert run("--output_file", "/dev/full") == 1
    found = [json.loads(line) for line in run.out.splitlines() if line.startswith("{")]
    assert [result["src"] for result in found] == ["hello", "world", "you"]
    assert "No space left on device" in run.err


def test_the_benchmark_fills_prompts_and_decodes_to_the_end(run: Runs) -> None:
    words = ("--src_length", "30", "--max_length", "50", "--batch_size", "2", "--append_attn")
    path = run.folder / "numbers.json"
    assert run(*words, "--benchmark", "--benchmark_file", str(path), src=None) == 0
    assert run.llm is not None
    warm_up, *timed = run.llm.calls
    assert warm_up[1][0].max_new_tokens == 8
    assert len(timed) == 3
    for prompts, params in timed:
        assert [len(prompt) for prompt in prompts] == [30, 30]
        assert (params[0].max_new_tokens, params[0].ignore_eos) == (20, True)
    assert not run.output.exists()
    for line in ("Start Benchmark", "Start Warmup", "Start Speed Test"):
        assert f"***********{line}**********\n" in run.out
    assert "Input length is: 30, Output length is: 20, bs is: 2, IPS: " in run.out
    assert "requests/s. \n" in run.out
    numbers = json.loads(path.read_text())
    assert numbers["num_output_tokens"] == 3 * 2 * 20
    assert numbers["inter_token_latency_ms"]["p50"] == pytest.approx(10.0)
    assert numbers["prefix_caching"] is False
    assert numbers["peak_memory_bytes"] == 3 * 2**30


def test_the_benchmark_needs_no_tokenizer(run: Runs, tmp_path: Path) -> None:
    words = ("--benchmark", "--load_format", "dummy", "--src_length", "5", "--max_new_tokens", "4")
    model = tmp_path / "config only"
    model.mkdir()
    assert run(*words, model=model, src=None) == 0
    assert "time to first token" in run.out


def test_a_data_file_is_answered_before_the_benchmark(run: Runs) -> None:
    assert run("--benchmark", "--src_length", "8", "--max_length", "12") == 0
    assert len(run.results) == 3
    assert run.out.index("*Source*") < run.out.index("*Start Benchmark*")


def script(code: str) -> Any:
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    return run_python("-c", code, env=environment)


def test_help_imports_nothing_but_our_own_and_the_standard_library() -> None:
    code = (
        "import sys, runpy\n"
        "at_start = set(sys.modules)\n"
        f"sys.argv = ['predictor.py', '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    packages = {name.partition('.')[0] for name in set(sys.modules) - at_start}\n"
        "    others = packages - sys.stdlib_module_names - {'predict'}\n"
        "    sys.exit(str(others) if others else stop.code)\n"
    )
    done = script(code)
    assert done.returncode == 0, done.stderr
    assert "--model_name_or_path" in done.stdout


# Every way that PaddleNLP's pages start a command, and ours, each from its own folder.
STARTS = [
    (".", ("predictor.py",)),
    ("predict", ("predictor.py",)),
    (".", ("./predict/predictor.py",)),
    ("tests", ("../predict/predictor.py",)),
    (".", ("-m", "predict.predictor")),
    (".", ("export_model.py",)),
    ("export", ("export_model.py",)),
    (".", ("run_quantization.py",)),
    ("quant", ("run_quantization.py",)),
    ("predict", ("../quant/evaluate.py",)),
]


@pytest.mark.parametrize(("folder", "words"), STARTS, ids=lambda part: str(part))
def test_commands_start_from_any_folder_and_take_paths_relative_to_it(
    tmp_path: Path, folder: str, words: tuple[str, ...]
) -> None:
    start = ROOT / folder
    relative = os.path.relpath(tmp_path / "none", start)
    argv = ["--model_name_or_path", relative, "--output_path", relative]
    if "predict" in words[-1]:
        argv = [*argv[:2], "--dtype", "float32", "--device", "cpu"]
    elif "export" in words[-1]:
        argv += ["--dtype", "float32", "--device", "cpu"]
    elif "evaluate" in words[-1]:
        argv = [*argv[:2], "--quant_type", "wint8"]
    for is_there in (False, True):
        if is_there:
            (tmp_path / "none").mkdir()
        done = run_python(*words, *argv, cwd=start)
        assert done.returncode == 2, done.stderr
        said = f"model directory {relative!r} was not found"
        assert (said in done.stderr) is not is_there


@pytest.mark.parametrize(
    "words",
    [
        ("predict/predictor.py", "--dtype", "float32", "--device", "cpu"),
        ("quant/run_quantization.py", "--quant_type", "wint8", "--output_path", "{out}"),
        ("quant/evaluate.py", "--quant_type", "wint8", "--device", "cpu"),
        ("-m", "predict.bench.kernels"),
        ("-m", "predict.bench.throughput"),
    ],
    ids=lambda words: words[1] if words[0] == "-m" else words[0],
)
def test_another_python_is_named_with_what_it_lacks(tmp_path: Path, words: tuple[str, ...]) -> None:
    argv = [word.replace("{out}", str(tmp_path / "out")) for word in words]
    if words[0] != "-m":
        argv += ["--model_name_or_path", str(DEMO)]
    done = run_python("-S", *argv)  # without its installed packages
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    for said in (sys.executable, "paddlepaddle, numpy", f"-m pip install -e {ROOT}"):
        assert said in line


def test_the_summary_says_how_drafts_went(run: Runs) -> None:
    class Drafting(FakeLLM):
        def stats(self) -> SimpleNamespace:
            return SimpleNamespace(
                num_draft_tokens=40,
                num_accepted_draft_tokens=10,
                num_draft_spans=20,
                num_accepted_by_position=(8, 2),
            )

    words = ("--append_attn", "--speculate_method", "inference_with_reference")
    assert run(*words, "--speculate_max_draft_token_num", "2", make=Drafting) == 0
    assert (
        "10 of 40 drafts accepted (25%), 1.50 tokens per step with drafts (by position 40% 10%)"
        in run.err
    )
    assert run(make=FakeLLM) == 0
    assert "drafts" not in run.err


def test_the_script_does_not_shadow_other_packages() -> None:
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='not main')\n"
        f"sys.exit({str(SCRIPT.parent)!r} in sys.path)\n"
    )
    assert script(code).returncode == 0


def test_a_closed_pipe_ends_the_printing_and_not_the_run(tmp_path: Path) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text('{"src": "hello"}\n' * 3)
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests' / 'cli')!r}]\n"
        "from test_predictor import FakeLLM\n"
        "from predict.predictor import main\n"
        "sys.exit(main(make_llm=FakeLLM))\n"
    )
    words = ["--model_name_or_path", MODEL, "--dtype", "float32", "--data_file", prompts]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words), "--output_file", str(output)],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 0, done.stderr
    assert "Broken" not in done.stderr
    assert len(output.read_text().splitlines()) == 3


def test_stop_strings_and_answers_come_from_flags_and_keys(run: Runs) -> None:
    lines = [
        {"src": "a", "stop": "\n", "n": 1, "logprobs": None},
        {"src": "b", "stop_token_ids": [5], "include_stop_str_in_output": True},
    ]
    file = run.folder / "own.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--stop", '["a, b", "[END]"]', "--num_return_sequences", "2", "--best_of", "3"]
    flags += ["--top_k", "0", "--logprobs", "4", "--data_file", str(file)]
    assert run(*flags, model=DEMO, src=None) == 0
    assert run.llm is not None
    first, second = run.llm.calls[0][1]
    assert (first.stop, first.n, first.best_of, first.logprobs) == (("\n",), 1, 3, None)
    assert (second.stop, second.n, second.logprobs) == (("a, b", "[END]"), 2, 4)
    assert (second.stop_token_ids, second.include_stop_str_in_output) == ((5,), True)
    assert run("--stop", "[END]") == 0
    assert run.llm.calls[0][1][0].stop == ("[END]",)


def test_a_contradiction_in_a_line_names_the_line(run: Runs) -> None:
    file = run.folder / "own.jsonl"
    file.write_text('{"src": "a"}\n{"src": "b", "stop": [""]}\n')
    assert run("--data_file", str(file), src=None) == 2
    assert "line 2 of own.jsonl: stop '' is not supported" in run.err
    assert run.llm is None


def test_a_line_may_name_an_adapter_and_an_unknown_one_names_the_line(run: Runs) -> None:
    file = run.folder / "own.jsonl"
    file.write_text('{"src": "a"}\n{"src": "b", "adapter": "sql"}\n')
    words = ("--data_file", str(file))
    assert run(*words, src=None, make=never) == 2
    assert "line 2 of own.jsonl: adapter is 'sql', and this model serves none" in run.err
    for name in ("sql", "chat"):
        (run.folder / name).mkdir()
    modules = ("--lora_modules", f"sql={run.folder / 'sql'}", f"chat={run.folder / 'chat'}")
    assert run(*words, *modules, src=None) == 0
    assert run.llm is not None
    assert [params.adapter for params in run.llm.calls[0][1]] == [None, "sql"]
    file.write_text('{"src": "a", "adapter": "sqk"}\n{"src": "b", "adapter": 3}\n')
    assert run(*words, *modules, src=None, make=never) == 2
    said = "line 1 of own.jsonl: adapter is 'sqk' (loaded: sql, chat); did you mean sql?"
    assert said in run.err
    file.write_text('{"src": "b", "adapter": 3}\n')
    assert run(*words, *modules, src=None, make=never) == 2
    assert "line 1 of own.jsonl: adapter 3 is not supported (allowed: a text, or None)" in run.err


def answers(*outputs: CompletionOutput) -> RequestOutput:
    first, metrics = outputs[0], RequestMetrics(0, 0, (), 0)
    common = (first.token_ids, first.text, first.finish_reason, metrics, outputs)
    return RequestOutput(0, (1, 2), *common, ({3: Logprob(-0.5, 1)},))


def test_several_answers_are_all_there_with_their_logprobs() -> None:
    logprobs = ({7: Logprob(-0.25, 1), 8: Logprob(-math.inf, 2)},)
    shown = [
        {"token_id": 7, "logprob": -0.25, "rank": 1},
        {"token_id": 8, "logprob": None, "rank": 2},
    ]
    item = data.DataItem("line 1", "s", "t")
    one = CompletionOutput(0, "x", (7,), "stop", -0.25, logprobs)
    line = result_line(item, answers(one))
    assert line["output"] == "x"
    assert line["logprobs"] == [shown]
    assert line["prompt_logprobs"] == [[{"token_id": 3, "logprob": -0.5, "rank": 1}]]
    line = result_line(item, answers(one, CompletionOutput(1, "y", (7,), "stop", -0.25, logprobs)))
    assert (line["output"], line["outputs"]) == ("x", ["x", "y"])
    assert line["logprobs"] == [[shown], [shown]]
    assert list(line) == ["src", "tgt", "output", "outputs", "logprobs", "prompt_logprobs"]


def test_an_answer_that_failed_is_named_and_the_others_are_written(run: Runs) -> None:
    class Failing(FakeLLM):
        def generate(self, prompts: Any, params: Any, on_output: Any = None, *more: Any) -> Any:
            def change(index: int, output: RequestOutput) -> None:
                if index == 1:
                    output = answers(CompletionOutput(0, "", (), "error", error="it broke"))
                on_output(index, output)

            return super().generate(prompts, params, change, *more)

    assert run(make=Failing) == 1
    assert "line 2 of prompts.jsonl: it broke" in run.err
    assert ["error" in result for result in run.results] == [False, True, False]
    assert [bool(result["output"]) for result in run.results] == [True, False, True]
