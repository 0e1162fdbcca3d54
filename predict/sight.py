"""What an LLM sees with: a model's tower, the table of its rows, and what a step reads of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.config.engine import EngineConfig
from predict.config.images import ImagesConfig
from predict.config.model import DTYPE_BYTES
from predict.engine.picture_rows import PictureRows
from predict.engine.pictures import Eyes, PassLimits
from predict.engine.runner.towers import passes_of, writing
from predict.errors import UserError, quoted, unknown_key
from predict.images.decoding import Decode, Workers
from predict.images.fetching import is_address
from predict.images.limits import MAX_TOGETHER
from predict.images.pixels import Pixels
from predict.images.placed import Picture, Pictures, picture_of, pictures_in, with_pictures
from predict.images.written import Encoder as TextEncoder
from predict.images.written import with_ids, written
from predict.loading.manifest import Manifest, load_manifest
from predict.loading.model import Weights
from predict.loading.platform import Platform
from predict.loading.program import values_dtype
from predict.loading.tower_program import load_tower
from predict.loading.vision import TowerWeights, open_tower, pixels_of
from predict.nn.decoder import Decoder
from predict.nn.rope import num_tables, rope_table
from predict.nn.spec import DecoderSpec
from predict.nn.tower import KEPT_PATCHES, Encoder, tables_of, with_images, with_room
from predict.nn.vision import MAX_SPANS, VisionSpec
from predict.ranks.front import Ranks
from predict.ranks.pictures import RankPictures, encode_over
from predict.system.notes import LOG
from predict.text.conversation import PicturePart

if TYPE_CHECKING:
    from paddle import Tensor

WITHOUT = "--limit_mm_per_prompt '{\"image\": 0}'"
LOOKED_UP = ("inference_with_reference", "lookahead")  # methods of drafts that run no network
PASS_PATCHES = 1 << 16  # of a tower at most: 2 to 4 GiB in 16 bits
BUCKET = 64  # tokens of the smallest graphs, and more
TABLES = 2  # rows of the table, in longest steps or prompts


def with_eyes(
    config: EngineConfig, spec: DecoderSpec, on_gpu: bool, reads_text: bool = False
) -> DecoderSpec:
    """The network, without its tower where no pictures are wanted, or an export has none.

    A program with a tower takes the fields of pictures, wanted or not. reads_text: text alone is
    what it is for. Where the flags say nothing of pictures, some kinds run with text alone. Raises
    UserError for what pictures do not go with yet.
    """
    if spec.vision is None:
        return spec
    is_static, is_blind = config.model.mode == "static", config.images.max_images == 0
    if is_static and not has_tower(config.model.model_name_or_path):
        check_blind(config, spec)
        return replace(spec, vision=None)
    if is_blind or reads_text:
        return spec if is_static else replace(spec, vision=None)
    method, token = config.speculation.speculate_method, spec.vision.placeholder.token
    degree = config.ranks.tensor_parallel_degree
    refused = {
        f"--device {config.model.device}": on_gpu and spec.vision.sees_itself,
        f"--tensor_parallel_degree {degree} on GPUs": on_gpu and degree > 1,
        f"a vocab_size of {spec.vocab_size} and a placeholder {token}": token >= spec.vocab_size,
        f"--speculate_method {method}": method not in (None, *LOOKED_UP),
    }
    for what, is_given in refused.items():
        if is_given and spec.vision.can_be_left_out and not config.images.limit_mm_per_prompt:
            LOG.info(f"{spec.model_type} runs with text alone: pictures do not go with {what} yet")
            return replace(spec, vision=None)
        if is_given:
            raise UserError(
                f"{spec.model_type} reads pictures, which do not go with {what} yet; leave "
                f"that out, or give {WITHOUT}: text alone runs then"
            )
    return spec


def has_tower(folder: str) -> bool:
    """Whether an export has a tower's program. Raises UserError where it is no export."""
    return load_manifest(folder).tower is not None


def check_blind(config: EngineConfig, spec: DecoderSpec) -> None:
    """Says that an export reads text alone. Raises UserError where pictures are asked for."""
    folder, asked = config.model.model_name_or_path, config.images.limit_mm_per_prompt
    if asked and config.images.max_images:
        raise UserError(
            f"the export in {folder} has no tower, and --limit_mm_per_prompt asks for pictures; "
            f"export {spec.model_type} again with export/export_model.py, or give {WITHOUT}"
        )
    if not asked:
        LOG.info(f"{spec.model_type} runs with text alone: the export in {folder} has no tower")


@dataclass(frozen=True)
class PictureReader:
    """Reads the pictures of prompts. Needs no weights: a server's front has one, too."""

    config: ImagesConfig
    pixels: Pixels
    spec: VisionSpec
    max_tokens: int  # of a prompt's pictures
    decode: Decode  # files

    def read(
        self,
        token_ids: Sequence[int],
        parts: Sequence[PicturePart],
        tokenizer: TextEncoder | None = None,
    ) -> tuple[list[int], Pictures | None]:
        """A prompt with all placeholders of its pictures, and these. Raises UserError.

        token_ids: with one placeholder for each picture. tokenizer: of kinds whose placeholders are
        texts.
        """
        self.config.check_count(len(parts))
        pictures, counts = list[Picture](), list[int]()
        num_tokens = num_pixels = 0
        most = self.config.max_image_pixels

        def check(height: int, width: int) -> None:
            """Of the next picture, before it is decoded and takes memory."""
            nonlocal num_tokens, num_pixels
            cells = self.spec.cells(pixels.grid(pixels.size(height, width)))
            self.spec.check_size(cells, where)
            num_tokens += pixels.num_tokens(cells, pixels.num_tiles(height, width))
            num_pixels += height * width
            if num_tokens > self.max_tokens:
                raise UserError(
                    f"{where} makes {num_tokens} tokens of pictures (allowed: {self.max_tokens}, "
                    "as max_length says); lower max_pixels, or raise max_length"
                )
            if num_pixels > MAX_TOGETHER * most:
                raise UserError(
                    f"{where} makes {num_pixels} pixels (allowed: {MAX_TOGETHER * most} in all); "
                    "shrink the pictures, or raise max_image_pixels"
                )

        for number, part in enumerate(parts, 1):
            where = f"picture {number} of the prompt"
            pixels = self.pixels.low() if part.is_low else self.pixels
            pixels = pixels.changed(part.options, where)
            made = picture_of(
                *(part.source, pixels, where, most, check, self.decode, self.config.media)
            )
            apart = pictures_in(made)
            pictures += apart
            counts.append(len(apart))
        holder = self.spec.placeholder if not parts else with_ids(self.spec.placeholder, tokenizer)
        return with_pictures(written(token_ids, counts, holder, tokenizer), pictures, holder)

    def fetched(self, parts: Sequence[PicturePart]) -> list[PicturePart]:
        """The parts, addresses fetched. Raises UserError for the first that cannot be."""
        self.config.check_count(len(parts))
        addresses: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            if is_address(part.source):
                addresses.setdefault(part.source, f"picture {number} of the prompt")
        found = self.config.media.all_of(addresses)
        return [
            part._replace(source=found[part.source]) if is_address(part.source) else part
            for part in parts
        ]


def reader_of(config: EngineConfig, spec: DecoderSpec) -> PictureReader | None:
    """What reads the pictures of a model's prompts; None where it takes none. Raises UserError."""
    images, vision = config.images, spec.vision
    if vision is None or not images.max_images:
        return None
    if config.model.mode == "static" and not has_tower(config.model.model_name_or_path):
        return None
    options, directory = dict(images.mm_processor_kwargs), config.model.model_name_or_path
    pixels = pixels_of(vision, directory, options)
    workers = Workers(images.max_image_pixels, images.max_image_seconds)
    return PictureReader(images, pixels, vision, config.max_length, workers.decode)


class Sight:
    """The parts of an LLM for pictures; of a model without a tower it changes nothing."""

    def __init__(self, config: EngineConfig, spec: DecoderSpec) -> None:
        """Reads how pictures become patches. Raises UserError where that does not fit the tower."""
        self.config, self.spec = config, spec.vision
        self.rows: PictureRows | None = None
        self.reader = reader_of(config, spec)
        self.eyes: Eyes | None = None
        self.tower: Encoder | None = None
        self.of_rank: RankPictures | None = None  # what encodes in one of several processes
        self._opened: TowerWeights | None = None
        if self.spec is not None:
            self.num_places = max(config.max_length, config.token_budget)
            # A program takes a table where none of its rows are read, too.
            count = TABLES * self.num_places if self.reader is not None else 1
            self.rows = PictureRows(count, self.spec.sees_itself)

    def open(self, text: Weights) -> int:
        """Checks the tower's tensors; the bytes that tower and table take."""
        if self.spec is None or self.rows is None:
            return 0
        self._opened = open_tower(text, self.spec)
        row = self.spec.row_size * DTYPE_BYTES[self.config.model.dtype]
        return self._opened.num_bytes + self.rows.num_rows * row

    def joined(self, decoder: Decoder) -> Decoder:
        """The decoder that reads rows of pictures; reads the tower's weights."""
        if self._opened is None:
            return decoder
        spec, platform = self._opened.spec, self._opened.text.platform
        table = self._table(spec, platform)
        made = with_images(decoder, spec, table, self.num_places)
        first = -1 if made.axes is None else made.axes.first
        self._see(self._opened.read(), table, platform, first)
        return made

    def of_program(self, text: DecoderSpec, manifest: Manifest, platform: Platform) -> list[Tensor]:
        """What the text's program takes of pictures; loads the tower's, if any are wanted."""
        import paddle

        spec, first = text.vision, -1
        if spec is None:
            return []
        table = self._table(spec, platform)
        tensors = tables_of(spec, table)
        if spec.axes:
            (dim, *_), (given, *_) = text.rotary_dims, text.ropes
            made = rope_table(given, dim, manifest.max_length, text.max_position)
            # Steps without pictures write rows, too, and graphs have room for twice their tokens.
            room = self.num_places if platform.gpu is None else 2 * self.num_places + BUCKET
            tensors.append(with_room(paddle.to_tensor(made, place=platform.place), room))
            first = len(made)
        tower = None
        if self.reader is not None and manifest.tower is not None:
            folder = Path(self.config.model.model_name_or_path)
            tower = load_tower(folder, manifest.tower, spec, platform.device)
        self._see(tower, table, platform, first, always=True)
        return tensors

    def _table(self, spec: VisionSpec, platform: Platform) -> Tensor:
        import paddle

        assert self.rows is not None
        dtype = values_dtype(platform.backend, self.config.model.dtype)
        return paddle.zeros([self.rows.num_rows, spec.row_size], dtype)

    def _see(
        self,
        tower: Encoder | None,
        table: Tensor,
        platform: Platform,
        first: int,
        always: bool = False,
    ) -> None:
        """Has rows of the table made by a tower; None: nobody asks for any. More: see Eyes."""
        spec, model = self.spec, self.config.model
        assert spec is not None
        assert self.rows is not None
        self.tower, encode, levels = tower, _never, len(spec.mergers)
        if tower is not None and self.reader is not None:
            dtype = values_dtype(platform.backend, model.dtype)
            rows = table.view([-1, spec.out_size])
            passes = passes_of(tower, dtype, platform, model.batch_invariant)
            encode = writing(passes, rows, platform, levels)
            more = platform.backend, rows, levels, self.reader.pixels
            self.of_rank = RankPictures(passes, *more)
        self.eyes = Eyes(self.rows, encode, first, self._limits(spec), levels, always)

    def over(self, text: DecoderSpec, ranks: Ranks) -> None:
        """Has rows made by ranks, in their tables."""
        spec, is_static = self.spec, self.config.model.mode == "static"
        if spec is None or self.rows is None:
            return
        first, length = -1, self.config.max_length
        if spec.axes:
            if is_static:
                length = load_manifest(self.config.model.model_name_or_path).max_length
            first = length * num_tables(text.ropes[0], length)
        levels = len(spec.mergers)
        self.eyes = Eyes(
            *(self.rows, encode_over(ranks), first, self._limits(spec), levels, is_static)
        )

    def _limits(self, spec: VisionSpec) -> PassLimits:
        budget = self.config.images.encoder_budget or self.config.token_budget
        patches, layers = self._pass_patches(spec), len(spec.layers)
        return PassLimits(patches, MAX_SPANS, spec.num_spans, layers, budget)

    def _pass_patches(self, spec: VisionSpec) -> int:
        """Patches of a pass: those of any prompt's pictures, within reason."""
        return min(self.config.max_length * spec.merge**2, PASS_PATCHES)

    @property
    def pass_bytes(self) -> int:
        """Memory that a pass takes beside weights and table, roughly."""
        spec = self.spec
        if spec is None or self.reader is None:
            return 0
        inner = max(block.costs.inner_size for block in spec.blocks())
        values = 12 * spec.hidden_size + 3 * inner + spec.patch_values
        kept = KEPT_PATCHES * spec.hidden_size if spec.learned is not None else 0
        return (self._pass_patches(spec) * values + kept) * DTYPE_BYTES[self.config.model.dtype]

    def read(
        self,
        token_ids: Sequence[int],
        parts: Sequence[PicturePart],
        tokenizer: TextEncoder | None = None,
    ) -> tuple[list[int], Pictures | None]:
        """See PictureReader. Raises UserError for pictures where the model has no tower."""
        if self.reader is not None:
            return self.reader.read(token_ids, parts, tokenizer)
        if parts:
            is_off = self.config.images.max_images == 0
            raise UserError(
                f"the prompt has {len(parts)} pictures, and this model reads text alone (allowed: "
                f"texts); leave them out{', or leave out limit_mm_per_prompt' * is_off}"
            )
        return list(token_ids), None


def picture_parts(data: Any) -> list[PicturePart]:
    """The pictures of a prompt's `multi_modal_data`. Raises UserError for other things."""
    if not isinstance(data, Mapping):
        raise UserError(f'multi_modal_data is {quoted(data)} (allowed: {{"image": [...]}})')
    for key, value in data.items():
        if key != "image" and value:
            raise unknown_key("multi_modal_data", key, ["image"])
    images = data.get("image")
    several = images if isinstance(images, (list, tuple)) else [images]
    return [
        each if isinstance(each, PicturePart) else PicturePart(each)
        for each in several
        if each is not None
    ]


def prompt_parts(prompt: Mapping[str, Any]) -> tuple[Any, list[PicturePart] | Pictures]:
    """Text or token ids, and pictures, of a prompt with both. Raises UserError.

    Pictures that were read before, whose tokens the prompt has, are returned as they are.
    """
    if not {"prompt", "prompt_token_ids", "multi_modal_data"}.issuperset(prompt):
        raise UserError(
            f"a prompt is {quoted(prompt)} (allowed: a text, token ids, or with pictures "
            '{"prompt": ..., "multi_modal_data": {"image": [...]}}; for conversations use chat)'
        )
    given = [prompt[key] for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
    if len(given) != 1:
        raise UserError(
            f"a prompt has {len(given)} of prompt, prompt_token_ids (allowed: one); write a text, "
            "or token ids"
        )
    own = given[0]
    data = prompt.get("multi_modal_data") or {}
    return own, data if isinstance(data, Pictures) else picture_parts(data)


def _never(
    pictures: Sequence[Picture],
    rows: Sequence[npt.NDArray[np.int32]],
    max_layers: int | None = None,
) -> Iterator[None]:
    """See Encode: of a model whose prompts have no pictures."""
    raise RuntimeError(f"{len(pictures)} pictures were not refused")
