"""The front's part of a model: its tokenizer and its chat template. Prompts in, token ids out.

Both run on threads of their own, so that a long prompt does not delay streams, under limits that
are checked before they run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from predict.errors import UserError
from predict.images.fetching import is_address
from predict.images.placed import Pictures
from predict.loading.model import read_spec
from predict.server.config import ServerConfig
from predict.server.errors import ApiError, invalid
from predict.sight import PictureReader, reader_of
from predict.system.bounds import prompt_token_ids
from predict.text.chat_template import ChatTemplate
from predict.text.conversation import Message, PicturePart, content_size
from predict.text.detokenizer import Detokenizer
from predict.text.token_texts import TokenTexts
from predict.text.tokenizer import Tokenizer

T = TypeVar("T")
FETCHES = 16  # prompts whose pictures are fetched, or were and wait to be decoded


class FrontModel:
    """A tokenizer and a chat template for the tasks of one event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        config: ServerConfig,
        pictures: PictureReader | None = None,
    ) -> None:
        """tokenizer: None where the model has none: prompts are token ids then, answers too.

        pictures: what reads them, for a model with eyes.
        """
        self.pictures = pictures
        self.tokenizer = tokenizer
        self._max_prompt_length = config.max_prompt_length
        self._threads = ThreadPoolExecutor(
            config.tokenizer_threads, thread_name_prefix="regatta-tokenizer"
        )
        # Of pictures alone: texts do not wait for them.
        self._eyes = ThreadPoolExecutor(
            config.tokenizer_threads, thread_name_prefix="regatta-pictures"
        )
        # Of addresses alone: a host that is slow holds no picture up that is there.
        self._fetching = ThreadPoolExecutor(FETCHES, thread_name_prefix="regatta-fetch")
        self._fetched = asyncio.Semaphore(FETCHES)
        self.token_texts = None if tokenizer is None else TokenTexts(tokenizer)
        # Writes special tokens out.
        self.literal = None if tokenizer is None else Detokenizer(tokenizer, False)
        # The longest token bounds the characters of a prompt of so many tokens.
        longest = max(map(len, tokenizer.vocabulary()), default=1) if tokenizer else 1
        self._max_characters = (self._max_prompt_length + 1) * max(longest, 1)

    @classmethod
    def load(cls, config: ServerConfig, reads_pictures: bool = True) -> FrontModel:
        """The tokenizer of the model's folder. Raises UserError where it is damaged."""
        model = config.engine.model
        tokenizer = None
        if Tokenizer.exists(model.model_name_or_path):
            tokenizer = Tokenizer.from_dir(model.model_name_or_path, model.chat_template)
        pictures = None
        if reads_pictures:
            spec, _ = read_spec(model.model_name_or_path, model.model_type)
            pictures = reader_of(config.engine, spec)
        return cls(tokenizer, config, pictures)

    def close(self) -> None:
        """Ends its threads; waiting work is dropped."""
        for threads in (self._threads, self._eyes, self._fetching):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template, where there is one."""
        return None if self.tokenizer is None else self.tokenizer.chat_template

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Raises ApiError 400 where they are too many for a prompt."""
        tokenizer = self._need_tokenizer(param)
        if len(text) > self._max_characters:
            raise self._too_long(param, f"{len(text)} characters, which are more tokens than that")
        ids = await self._run(partial(tokenizer.encode, text, add_special_tokens), param)
        return self._checked(ids, param)

    async def work(self, make: Callable[[Tokenizer], T], param: str, texts: Sequence[str]) -> T:
        """What `make` makes with the tokenizer. Raises ApiError 400; texts: what it is made of."""
        tokenizer = self._need_tokenizer(param)
        size = sum(map(len, texts))
        if size > 2 * self._max_characters:
            raise self._too_long(param, f"{size} characters, which are more tokens than that")
        return await self._run(partial(make, tokenizer), param)

    async def num_tokens(self, text: str) -> int:
        """Tokens of a text, of any length; 0 where there is no tokenizer."""
        if not text or self.tokenizer is None:
            return 0
        return len(await self._run(partial(self.tokenizer.encode, text, False), "text"))

    def token_ids(self, value: Any, param: str, vocab_size: int) -> list[int]:
        """A prompt that is token ids already. Raises ApiError 400."""
        if len(value) > self._max_prompt_length:
            raise self._too_long(param, f"{len(value)} tokens")
        try:
            return self._checked(prompt_token_ids(value, vocab_size - 1), param)
        except UserError as error:
            raise invalid(param, f"{param}: {error}") from None

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> str:
        """The text of a conversation, as the chat template writes it. Raises ApiError 400."""
        self._need_tokenizer("messages")
        template = self.template
        if template is None:
            raise invalid(
                "messages",
                "this model has no chat template; start the server with --chat_template, or use "
                "/v1/completions",
                "no_chat_template",
            )
        if len(messages) > self._max_prompt_length:  # some templates take quadratic time
            raise self._too_long("messages", f"{len(messages)} messages, of a token at least")
        size = sum(content_size(message["content"]) for message in messages)
        if size > self._max_characters:
            raise self._too_long("messages", f"{size} characters, more tokens than that")
        return await self._run(partial(template.render, messages, tools, values), "messages")

    async def see(
        self, token_ids: list[int], found: Sequence[tuple[str, PicturePart]]
    ) -> tuple[list[int], Pictures | None]:
        """A prompt with its pictures, and these. Raises ApiError 400.

        found: the fields of the request, and what they bring.
        """
        reader = self.pictures
        if reader is None or not found:
            return token_ids, None
        parts = [part for _, part in found]
        for param, part in found:  # what is not allowed is told ahead of all fetching
            if is_address(part.source):
                with _told_of(param):
                    reader.config.media.check(part.source, param)
        fetches = any(is_address(part.source) for part in parts)
        async with (
            self._fetched if fetches else contextlib.nullcontext()
        ):  # bytes are held until the end
            if fetches:
                parts = await self._run(partial(reader.fetched, parts), found[0][0], self._fetching)
            ids, pictures = await self._run(
                partial(reader.read, token_ids, parts, self.tokenizer), found[0][0], self._eyes
            )
        return self._checked(ids, "messages"), pictures

    async def decode(self, token_ids: Sequence[int], param: str) -> str:
        """The text of token ids, special tokens written out. Raises ApiError 400."""
        tokenizer = self._need_tokenizer(param)
        return await self._run(partial(tokenizer.decode, token_ids, False), param)

    async def prompt_texts(self, token_ids: Sequence[int], text: str) -> list[str]:
        """What each token of a prompt adds to `text`; see TokenTexts.of_prompt."""
        assert self.token_texts is not None
        return await self._run(partial(self.token_texts.of_prompt, token_ids, text), "prompt")

    async def _run(
        self, work: Callable[[], T], param: str, threads: ThreadPoolExecutor | None = None
    ) -> T:
        with _told_of(param):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads or self._threads, work)

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise invalid(param, "this model has no tokenizer; give prompts as token ids")
        return self.tokenizer

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise invalid(param, f"{param} has no tokens; write something")
        if len(ids) > self._max_prompt_length:
            raise self._too_long(param, f"{len(ids)} tokens")
        return ids

    def _too_long(self, param: str, got: str) -> ApiError:
        return invalid(
            param,
            f"{param} has {got} (allowed: {self._max_prompt_length} tokens of a prompt); shorten "
            "it",
            "context_length_exceeded",
        )


@contextlib.contextmanager
def _told_of(param: str) -> Iterator[None]:
    """Raises UserErrors as ApiErrors of a field."""
    try:
        yield
    except UserError as error:
        raise invalid(param, str(error)) from None
