"""Requests to models with experts: one whose router sees a NaN ends alone."""

from __future__ import annotations

from typing import Any

import pytest

from predict import LLM, SamplingParams
from predict.ops import compiled as compiled_ops
from predict.ops import plain as plain_ops
from tests.support.expert_models import FAMILIES
from tests.support.golden import config, golden


def break_rows(patch: pytest.MonkeyPatch, token: int) -> None:
    """Makes the hidden states of a token NaN, in the rows of its own alone."""
    import paddle

    for backend in (plain_ops, compiled_ops):

        def embed(inputs: Any, *weights: Any, own: Any = backend.embed) -> Any:
            hidden = own(inputs, *weights)
            rows = (inputs.token_ids == token).unsqueeze(1)
            return paddle.where(rows, paddle.full_like(hidden, float("nan")), hidden)

        patch.setattr(backend, "embed", embed)


@pytest.mark.parametrize(
    ("family", "operators"),
    [*((family, "fused") for family in FAMILIES), ("mixtral", "reference")],
    indirect=["operators"],
)
def test_a_nan_in_the_router_ends_its_request_alone(
    family: str, operators: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FAMILIES[family]
    prompts, answers = golden(case)["prompts"], golden(case)["greedy"]
    used = {token for tokens in (*prompts, *answers) for token in tokens}
    token = next(number for number in range(3, 211) if number not in used)
    llm = LLM(config(case, batch_size=len(prompts) + 1, **operators))
    params = SamplingParams(max_new_tokens=len(answers[0]), temperature=0.0, ignore_eos=True)
    break_rows(monkeypatch, token)
    broken, *others = llm.generate([[*prompts[0][:6], token, 5], *prompts], params)
    assert "no finite largest logit" in str(broken.outputs[0].error)
    assert [list(output.token_ids) for output in others] == answers
    assert llm.stats().num_used_blocks == 0
