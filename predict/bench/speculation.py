"""What drafts bring: the same requests with and without them, in one process, in turns.

Two texts. "copy" repeats the prompt with an edit here and there; in "random" nothing repeats, and
drafts can only lose. Random weights write neither, so both are scripts: each step runs whole, and
then the host puts the script's tokens in the place of the model's. A draft model that would agree
with a copy cannot be made either: its steps run whole too, but each draft that is verified is the
script's with a given probability. What is accepted follows from the drafts, as it does without a
script.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from predict.engine.drafts import FAILED, StateProposer, Tapped, Verified, accepted_tokens
from predict.engine.request_state import Request
from predict.engine.sampler import Sampler
from predict.engine.step import NO_TARGETS, Choices, Logprobs, PromptTargets, StepTokens
from predict.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paddle import Tensor
    from predict.engine.beams import Candidates
    from predict.engine.choices import Row
    from predict.engine.drafts import Drafts, ProposeBehind, Proposer
    from predict.engine.step import Runner
    from predict.llm import LLM
    from predict.nn.decoder import StepOutputs
    from predict.nn.inputs import StepInputs

MOST_WARM_UPS = 4  # runs with and without drafts
Scripts = Mapping[tuple[int, ...], list[int]]  # by prompt, the output
StandIns = Mapping[int, int]  # by placeholder of a draft model's, the draft that is verified


class ScriptedTokens(StepTokens):
    """The tokens of a script, in the place of those that a step chose."""

    def __init__(self, tokens: StepTokens, script: list[int], stand_ins: StandIns):
        self._tokens = tokens
        self._script = script
        self._stand_ins = dict(stand_ins)
        self.hidden = tokens.hidden

    def choose(self) -> None:
        """Nothing: the script's tokens need no choice."""

    def take(self) -> list[int | Candidates]:
        """The script's tokens, once the step's own are there."""
        self._tokens.take()
        return list(self._script)

    def known(self, drafts: Sequence[int]) -> list[int]:
        """The script's tokens that stand in for placeholders; of other drafts the step's own."""
        pairs = zip(drafts, self._tokens.known(drafts), strict=True)
        return [self._stand_ins.get(draft, token) for draft, token in pairs]

    def logprobs(self) -> Logprobs:
        """None: a benchmark's requests ask for none."""
        return Logprobs()


class ScriptedChoices(Choices):
    """Choices, and what the script has in their place."""

    script: list[int]

    def _replace(self, **changes: Any) -> ScriptedChoices:
        made = super()._replace(**changes)
        made.script = self.script
        return made


class ScriptedSampler(Sampler):
    """A sampler that looks up the script besides."""

    def __init__(self, sampler: Sampler, scripts: Scripts, stand_ins: StandIns):
        super().__init__(sampler.seed, sampler.eos_token_ids)
        self._scripts = scripts
        self._stand_ins = stand_ins

    def choices(self, rows: Sequence[Row], prompt: PromptTargets = NO_TARGETS) -> Choices:
        """The choices of a step's rows, with the script's."""
        choices = ScriptedChoices(*super().choices(rows, prompt))
        choices.script = [self._choice(row) for row in rows]
        return choices

    def _choice(self, row: Row) -> int:
        """The script's token; after a wrong draft, any other token."""
        script = self._scripts[tuple(row.request.prompt_token_ids)]
        place = row.num_output_tokens
        drafts = [self._stand_ins.get(draft, draft) for draft in row.drafts]
        right = drafts == script[place - len(drafts) : place]
        return script[place] if right else script[place] ^ 1


class ScriptedRunner:
    """A runner whose tokens follow a script. See predict.engine.step.Runner."""

    def __init__(self, runner: Runner, stand_ins: StandIns):
        self._runner = runner
        self._stand_ins = stand_ins
        self.num_ahead = runner.num_ahead
        self.copy_blocks = runner.copy_blocks

    @property
    def num_recorded(self) -> int:
        return self._runner.num_recorded

    def launch(self, inputs: StepInputs, choices: Choices) -> ScriptedTokens:
        assert isinstance(choices, ScriptedChoices)
        tokens = self._runner.launch(inputs, choices)
        return ScriptedTokens(tokens, choices.script, self._stand_ins)

    def run(self, inputs: StepInputs, taps: Sequence[str] = ()) -> StepOutputs:
        return self._runner.run(inputs, taps)


class AgreeingProposer:
    """A draft model whose drafts are the script's, each with a probability. See Proposer.

    stand_ins: of the last proposal's placeholders.
    """

    def __init__(self, proposer: Proposer, scripts: Scripts, agreement: float, seed: int = 0):
        self._proposer = proposer
        self._scripts = scripts
        self._agreement = agreement
        self._random = np.random.default_rng(seed)
        self.stand_ins: dict[int, int] = {}
        behind = proposer.propose_behind
        self.propose_behind: ProposeBehind | None = (
            None if behind is None else partial(self._propose_behind, behind)
        )
        self.looks_up = proposer.looks_up
        self.observe = proposer.observe
        self.settle = proposer.settle

    def forget(self, request_id: int) -> None:
        self._proposer.forget(request_id)

    @property
    def num_recorded(self) -> int:
        return self._proposer.num_recorded

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Sequence[int]]:
        self.stand_ins.clear()
        proposals: list[Sequence[int]] = []
        own = self._proposer.propose(requests, limits)
        for request, limit, drafts in zip(requests, limits, own, strict=True):
            scripted = self._scripted(request, request.num_output_tokens, limit)
            if any(draft < FAILED for draft in drafts):
                self.stand_ins.update(zip(drafts, scripted, strict=True))
                proposals.append(drafts)
            else:
                proposals.append(scripted)
        return proposals

    def _propose_behind(
        self, propose: ProposeBehind, verified: Sequence[Verified], limits: Sequence[int]
    ) -> Drafts:
        """The steps begin where the model's own tokens get, the drafts where the script's do."""
        before = dict(self.stand_ins)
        self.stand_ins.clear()
        own = propose(verified, limits)
        for request, _, drafts in verified:
            behind = own.get(request.request_id, ())
            begin = request.num_output_tokens
            script = self._scripts[tuple(request.prompt_token_ids)][begin:]
            begin += len(accepted_tokens([before[draft] for draft in drafts], script))
            scripted = self._scripted(request, begin, len(behind))
            self.stand_ins.update(zip(behind, scripted, strict=True))
        return own

    def _scripted(self, request: Request, begin: int, count: int) -> list[int]:
        right = self._scripts[tuple(request.prompt_token_ids)][begin : begin + count]
        agrees = self._random.random(len(right)) < self._agreement
        return [t if a else t ^ 1 for t, a in zip(right, agrees, strict=True)]


class AgreeingStateProposer(AgreeingProposer, StateProposer):
    """The same of a drafter of hidden states, which reads those of the model."""

    def __init__(self, proposer: StateProposer, scripts: Scripts, agreement: float, seed: int = 0):
        AgreeingProposer.__init__(self, proposer, scripts, agreement, seed)
        self._reads, self.taps, self.lookahead = proposer, proposer.taps, proposer.lookahead

    def follow(self, tapped: Sequence[Tapped], hidden: Mapping[str, Tensor]) -> None:
        self._reads.follow(tapped, hidden)

    def is_ready(self, request: Request) -> bool:
        return self._reads.is_ready(request)

    def suits(self, block_id: int, digest: bytes) -> bool:
        return self._reads.suits(block_id, digest)


def agreeing(proposer: Proposer, scripts: Scripts, agreement: float, seed: int) -> AgreeingProposer:
    """The proposer with drafts that are the script's so often."""
    if isinstance(proposer, StateProposer):
        return AgreeingStateProposer(proposer, scripts, agreement, seed)
    return AgreeingProposer(proposer, scripts, agreement, seed)


class Counts(NamedTuple):
    """Of one run."""

    seconds: float
    num_spans: int
    num_drafts: int
    num_accepted: int


@contextmanager
def replaced(
    llm: LLM,
    proposer: Proposer | None,
    scripts: Scripts | None = None,
    stand_ins: StandIns = MappingProxyType({}),
) -> Iterator[None]:
    """The engine with another proposer, and with tokens that follow scripts."""
    engine = llm.engine
    before = engine.runner, engine.sampler, engine.speculation.proposer
    if scripts is not None:
        engine.sampler = ScriptedSampler(engine.sampler, scripts, stand_ins)
        engine.runner = ScriptedRunner(engine.runner, stand_ins)
    engine.speculation.proposer = proposer
    try:
        yield
    finally:
        engine.runner, engine.sampler, engine.speculation.proposer = before


def counted(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Counts:
    """One run over all prompts at once."""
    before = llm.stats()
    start = time.perf_counter()
    llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    after = llm.stats()
    return Counts(
        seconds,
        after.num_draft_spans - before.num_draft_spans,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_draft_tokens - before.num_accepted_draft_tokens,
    )


def copies(
    prompts: Sequence[Sequence[int]], output_len: int, edits: float, vocab_size: int, seed: int
) -> dict[tuple[int, ...], list[int]]:
    """Each prompt's own tokens, over and over; a share of `edits` are others."""
    random = np.random.default_rng(seed)
    scripts = {}
    for prompt in prompts:
        text = np.resize(np.asarray(prompt), output_len)
        other = random.integers(0, vocab_size, output_len)
        edited = np.where(random.random(output_len) < edits, other, text)
        scripts[tuple(prompt)] = edited.tolist()
    return scripts


def measure_drafts(
    llm: LLM, prompts: Sequence[list[list[int]]], output_len: int, edits: float, agreement: float
) -> dict[str, Any]:
    """Both texts with and without drafts; prompts: of each repetition.

    Before it, runs of the first one until none records a graph, or MOST_WARM_UPS.
    """
    engine, vocab_size = llm.engine, llm.spec.vocab_size
    results: dict[str, Any] = {}
    params = SamplingParams(max_new_tokens=output_len, ignore_eos=True, temperature=0.0)

    def turns(text: str, batch: list[list[int]], seed: int) -> dict[bool, Counts]:
        """A run with drafts and one without."""
        share = edits if text == "copy" else 1.0
        scripts = copies(batch, output_len, share, vocab_size, seed)
        proposer, stand_ins = engine.speculation.proposer, dict[int, int]()
        assert proposer is not None
        if text == "copy" and not proposer.looks_up:
            agrees = agreeing(proposer, scripts, agreement, seed)
            proposer, stand_ins = agrees, agrees.stand_ins
        with replaced(llm, None, scripts):  # both turns find the prompts in the prefix cache
            counted(llm, batch, replace(params, max_new_tokens=1))
        taken: dict[bool, Counts] = {}
        for drafts in (False, True) if seed % 2 else (True, False):
            with replaced(llm, proposer if drafts else None, scripts, stand_ins):
                taken[drafts] = counted(llm, batch, params)
        return taken

    for text in ("copy", "random"):
        for seed in range(MOST_WARM_UPS):
            before = engine.num_recorded
            turns(text, prompts[0], seed)
            if engine.num_recorded == before:
                break
        runs: dict[bool, list[Counts]] = {False: [], True: []}
        for seed, batch in enumerate(prompts, MOST_WARM_UPS + 1):
            for drafts, run in turns(text, batch, seed).items():
                runs[drafts].append(run)
        without, with_ = (
            statistics.median(run.seconds for run in runs[drafts]) for drafts in (False, True)
        )
        tokens = output_len * len(prompts[0])
        _, spans, drafted, accepted = (sum(each) for each in zip(*runs[True], strict=True))
        results |= {
            f"{text}_tokens_per_s_without_drafts": tokens / without,
            f"{text}_tokens_per_s": tokens / with_,
            f"{text}_speed_up": without / with_,
            f"{text}_acceptance_rate": accepted / drafted if drafted else None,
            f"{text}_mean_accepted_length": accepted / spans if spans else None,
            f"{text}_mean_draft_length": drafted / spans if spans else None,
            f"{text}_drafted_share": (spans + accepted) / (tokens * len(prompts)),
        }
    return results
