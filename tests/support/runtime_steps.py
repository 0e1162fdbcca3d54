"""Steps of an engine, recorded, and their logits by a folder's network in C++."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from predict import LLM, SamplingParams
from predict.engine import batch, engine
from predict.engine.runner.networks import HostRunner
from predict.nn.inputs import RowKind, StepInputs


class Step(NamedTuple):
    """A step: its inputs, without places, and the logits [L, V] that it gave.

    prompts: of its requests, where their places follow from these.
    """

    inputs: StepInputs
    prompts: Sequence[Sequence[int]]
    logits: npt.NDArray[np.float32]

    def data(self) -> bytes:
        """The step as tests/native/runtime_steps.cc reads it."""
        of = self.inputs
        sizes = (len(of.token_ids), len(of.context_lens), of.block_tables.shape[1])
        counts = (len(of.logit_indices), bool(self.prompts))
        parts: list[Any] = [(*sizes, *counts), *of[:8]]
        parts += [(len(prompt), *prompt) for prompt in self.prompts]
        return b"".join(np.asarray(part, np.int32).tobytes() for part in parts)


@contextmanager
def recording(llm: LLM) -> Iterator[list[Step]]:
    """The steps that an engine of the CPU runs within the block."""
    steps: list[Step] = []
    unplaced: list[tuple[StepInputs, Sequence[Sequence[int]]]] = []
    runner, patch = llm.engine.runner, pytest.MonkeyPatch()
    assert isinstance(runner, HostRunner)
    run = runner.network.run

    def note(inputs: StepInputs, spans: Any, placing: Any) -> StepInputs:
        unplaced.append((inputs, [span.request.prompt_token_ids for span in spans]))
        return batch.placed(inputs, spans, placing)

    def recorded(inputs: StepInputs, *more: Any) -> Any:
        outputs = run(inputs, *more)
        own, prompts = unplaced.pop() if unplaced else (inputs, ())
        assert outputs.logits is not None
        steps.append(Step(own, prompts, np.array(outputs.logits.cpu().numpy())))
        return outputs

    patch.setattr(runner.network, "run", recorded)
    patch.setattr(engine, "placed", note)
    try:
        yield steps
    finally:
        patch.undo()


def steps_of(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Step]:
    """The steps of greedy answers."""
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    with recording(llm) as steps:
        llm.generate([list(prompt) for prompt in prompts], params)
    return steps


def runtime_logits(
    program: Sequence[str], folder: Path, steps: Sequence[Step], num_blocks: int
) -> list[npt.NDArray[np.float32]]:
    """The logits of each step by the network of a folder. program: with what it is run by."""
    given, made = folder.parent / "steps.bin", folder.parent / "logits.bin"
    given.write_bytes(b"".join(step.data() for step in steps))
    command = [*program, str(folder), str(num_blocks), str(given), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    values = np.fromfile(made, np.float32)
    ends = np.cumsum([step.logits.size for step in steps])
    assert len(values) == ends[-1]
    parts = np.split(values, ends[:-1])
    return [part.reshape(step.logits.shape) for part, step in zip(parts, steps, strict=True)]


def check_bits(program: Path, folder: Path, steps: Sequence[Step], num_blocks: int) -> None:
    """Raises AssertionError unless all logits are the same bits."""
    found = runtime_logits([str(program)], folder, steps, num_blocks)
    for number, (step, logits) in enumerate(zip(steps, found, strict=True)):
        if step.inputs.row_kind == RowKind.NONE:
            continue
        same = step.logits.view(np.uint32) == logits.view(np.uint32)
        assert same.all(), f"step {number}: {(~same).sum()} of {same.size} logits differ"
