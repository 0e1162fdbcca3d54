"""The choice of tokens on the host, and for devices that have no compiled operators."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predict.engine.beams import Candidates, likeliest, log_softmax
from predict.engine.choices import GREEDY, Choice
from predict.engine.logprobs import LogprobTable, measure
from predict.engine.masks import masks_from, num_words
from predict.engine.step import Adjusted, Choices, KnownTokens, Logprobs, are_largest
from predict.engine.window import verified
from predict.nn.decoder import StepOutputs
from predict.nn.spec import Share
from predict.ops import composed
from predict.ops.columns import CHOICES
from predict.ops.plain_sampling import largest_of_ranks

if TYPE_CHECKING:
    from paddle import Tensor

_DTYPES = [CHOICES.dtype(name) for name in Choice._fields]
_NUM_PLAIN = Choice._fields.index("min_p")  # columns ahead of min_p and typical_p


class HostChooser:
    """Chooses a step's tokens, which are known at once."""

    def __init__(self, backend: ModuleType, columns: npt.NDArray[np.int64] | None = None):
        """columns: by token, where logits are of fewer tokens; see `known_tokens`."""
        self._backend, self._columns_of = backend, columns
        # The last one is of what could not be drawn.
        self._ids = None if columns is None else np.append(known_tokens(columns), -1)
        # By number of rows: five uploads are a tenth of a small model's step on the host.
        self._greedy_columns: dict[int, list[Tensor]] = {}

    def choose(self, outputs: StepOutputs, choices: Choices) -> KnownTokens:
        """The tokens, and the logprobs that are wanted."""
        if outputs.share is not None:
            if outputs.logits is not None and are_largest(choices):
                return KnownTokens(
                    self._largest(outputs.logits, choices, outputs.share), Logprobs()
                )
            outputs = self.whole(outputs)
        logits, num_rows, prompt = outputs.logits, len(choices.rows), choices.prompt
        of_tokens: LogprobTable | None = None
        of_prompt: LogprobTable | None = None
        if logits is None:
            return KnownTokens((), Logprobs())
        if prompt.token_ids:
            values = logits[num_rows : num_rows + len(prompt.token_ids)].numpy()
            of_prompt = measure(values, prompt.token_ids, prompt.num_top)
            logits = logits[:num_rows]
        tokens: list[int | Candidates] = []
        if num_rows:
            num_top = choices.num_top
            raw = None if num_top is None else logits.numpy().copy()
            tokens = self.tokens(logits, choices)
            if raw is not None and num_top is not None:
                # A request without a token ends, and beams have no logprobs: token 0 stands in.
                known = [max(token, 0) if isinstance(token, int) else 0 for token in tokens]
                of_tokens = measure(raw, known, num_top)
        return KnownTokens(tokens, Logprobs(of_tokens, of_prompt))

    def whole(self, outputs: StepOutputs) -> StepOutputs:
        """See predict.ops.composed.whole."""
        return composed.whole(self._backend, outputs)

    def _largest(self, logits: Tensor, choices: Choices, share: Share) -> list[int]:
        """The tokens of `largest_of_ranks`, as the choices change their logits."""
        begin, end = share.tokens()
        values = logits.numpy()[:, : end - begin]
        for row, adjusted in enumerate(choices.adjusted or ()):
            if adjusted is not None:
                padded = np.zeros(share.whole.vocab_size, np.float32)  # its pages are not touched
                padded[begin:end] = values[row]
                _apply(padded, adjusted)
                values[row] = padded[begin:end]
        if choices.fill_masks is not None:
            masks = np.empty((len(values), num_words(share.whole.vocab_size)), np.int32)
            choices.fill_masks(masks)
            own = masks_from(masks, begin, num_words(end - begin)).view(np.uint8)
            allowed = np.unpackbits(own, axis=1, bitorder="little")
            values[allowed[:, : end - begin] == 0] = -np.inf
        found: list[int] = largest_of_ranks(values, share).tolist()
        return found

    def tokens(self, logits: Tensor, choices: Choices) -> list[int | Candidates]:
        """Token ids, one per row of logits [len(choices.rows), V]; -1 where none can be drawn.

        A beam's row gets candidates in place of a token.
        """
        if not choices.candidates:
            return [*self._drawn(logits, choices)]
        values, adjusted = logits.numpy(), choices.adjusted
        found: dict[int, int | Candidates] = {}
        for row, count in choices.candidates.items():
            log_probs = values[row].copy()
            log_softmax(log_probs)
            _apply(log_probs, None if adjusted is None else adjusted[row])
            found[row] = likeliest(log_probs, count)
        drawn = self._drawn(logits, choices) if len(found) < len(values) else [0] * len(values)
        return [found.get(row, token) for row, token in enumerate(drawn)]

    def adjusted(self, logits: Tensor, choices: Choices) -> Tensor:
        """Adjusted logits; the logits themselves without adjustments."""
        import paddle

        if choices.adjusted is None:
            return logits
        changed = logits.numpy().copy()
        for values, adjusted in zip(changed, choices.adjusted, strict=True):
            _apply(values, adjusted)
        return paddle.to_tensor(changed, place=logits.place)

    def _drawn(self, logits: Tensor, choices: Choices) -> list[int]:
        ids = self._ids if choices.fill_masks is None else None
        if ids is None:
            logits = self._masked(self.adjusted(self._of_all(logits), choices), choices)
        drawn = self._backend.sample(logits, *self._columns(choices.rows))
        if ids is not None:
            of_few: list[int] = ids[drawn.numpy()].tolist()
            return of_few
        tokens: list[int] = drawn.tolist()
        if choices.window is not None:
            return verified(tokens, logits.numpy(), choices.window, choices.rows)
        return tokens

    def _of_all(self, logits: Tensor) -> Tensor:
        """Logits of all tokens, -inf of those without a column."""
        import paddle

        if self._columns_of is None:
            return logits
        nothing = np.full((len(logits), 1), -np.inf, np.float32)
        values = np.concatenate([logits.numpy(), nothing], axis=1)
        return paddle.to_tensor(values[:, self._columns_of], place=logits.place)

    def _columns(self, choices: Sequence[Choice]) -> list[Tensor]:
        """The sampling operator's inputs besides the logits."""
        import paddle

        all_greedy = all(choice is GREEDY for choice in choices)
        if all_greedy and len(choices) in self._greedy_columns:
            return self._greedy_columns[len(choices)]
        narrowed = any(choice.min_p or choice.typical_p < 1 for choice in choices)
        columns = [
            paddle.to_tensor(np.array([choice[index] for choice in choices], dtype))
            for index, dtype in enumerate(_DTYPES if narrowed else _DTYPES[:_NUM_PLAIN])
        ]
        if all_greedy:
            self._greedy_columns[len(choices)] = columns
        return columns

    def _masked(self, logits: Tensor, choices: Choices) -> Tensor:
        """Logits without the tokens that guides forbid, changed in place."""
        import paddle

        if choices.fill_masks is None:
            return logits
        masks = np.empty((len(choices.rows), num_words(logits.shape[1])), np.int32)
        choices.fill_masks(masks)
        return self._backend.mask_logits(logits, paddle.to_tensor(masks, place=logits.place))


def known_tokens(columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """[D] token of each column, of [V] columns by token; D for tokens that have none."""
    count = len(np.unique(columns))  # one for all that it does not know
    count -= count < len(columns)
    return np.argsort(columns, kind="stable")[:count].astype(np.int32)


def _apply(values: npt.NDArray[np.float32], adjusted: Adjusted | None) -> None:
    if adjusted is not None:
        tokens = [*adjusted.token_ids, *adjusted.drafts]
        adjusted.adjustment.apply(values, tokens, adjusted.num_prompt_tokens)
