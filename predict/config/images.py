"""Pictures in prompts: how many, how large, how they become patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predict.errors import UserError, unknown_key
from predict.images.limits import MAX_PIXELS, MOST_PIXELS, check_options
from predict.system.options import Checked, option
from predict.system.ranges import Range, refusal

NUM_IMAGES = Range(0, 1024)  # of a prompt
KINDS = ("image", "video", "audio")


def _limits(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise refusal("limit_mm_per_prompt", value, 'an object such as {"image": 4}')
    for key, limit in value.items():
        if key not in KINDS:
            raise unknown_key("limit_mm_per_prompt", key, KINDS)
        allowed = NUM_IMAGES if key == "image" else Range(0, 0, words="0: pictures alone are read")
        allowed.taken(f"limit_mm_per_prompt: {key}", limit)
    return dict(value)


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refusal("mm_processor_kwargs", value, 'an object such as {"max_pixels": 1003520}')
    check_options(value, "mm_processor_kwargs")
    return dict(value)


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Checked):
    """Pictures in prompts of models with eyes. Raises UserError for other values."""

    # fmt: off
    limit_mm_per_prompt: Mapping[str, int] = option(dict,
        'Pictures of a prompt at most, {"image": 4}; with {"image": 0} a model\'s tower is not '
        "loaded, and text alone runs.",
        group="Pictures", allowed=_limits, kind="json", flag_default=None)
    mm_processor_kwargs: Mapping[str, Any] = option(dict,
        'Options of pictures in place of the model\'s own: {"min_pixels": ..., "max_pixels": ...}.',
        allowed=_options, kind="json", flag_default=None)
    max_image_pixels: int = option(MAX_PIXELS,
        "Pixels of a picture at most, as its file's header says, before it is decoded.",
        allowed=Range(1, MOST_PIXELS))
    max_image_seconds: float = option(10.0,
        "CPU seconds that a picture's file may take to decode and resize, in a process of its own; "
        "one that takes longer is refused.",
        allowed=Range(0.1, 600.0))
    # fmt: on

    @property
    def max_images(self) -> int:
        """Pictures of a prompt at most."""
        return self.limit_mm_per_prompt.get("image", int(NUM_IMAGES.high))

    def check_count(self, count: int) -> None:
        """Raises UserError for more pictures than a prompt may have."""
        if count > self.max_images:
            raise UserError(
                f"the prompt has {count} pictures (allowed: up to {self.max_images}); raise "
                "--limit_mm_per_prompt"
            )
