"""Pictures in prompts: how many, how large, how they become patches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predict.errors import UserError, unknown_key
from predict.images.fetching import Media
from predict.images.limits import MAX_PIXELS, MOST_PIXELS, SWITCHES, check_options
from predict.system.options import Checked, option
from predict.system.ranges import MAX_COUNT, Range, refusal

NUM_IMAGES = Range(0, 1024)  # of a prompt
KINDS = ("image", "video", "audio")
COUNT = Range(1, MAX_COUNT)
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:[0-9]{1,5})?")


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
    switches = {key: each for key, each in value.items() if key in SWITCHES}
    for key, each in switches.items():
        if not isinstance(each, bool):
            raise refusal(f"mm_processor_kwargs: {key}", each, "true, false")
    areas = {key: each for key, each in value.items() if key not in switches}
    check_options(areas, "mm_processor_kwargs")
    return dict(value)


def _hosts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise refusal("allowed_media_domains", value, "a tuple of hosts")
    for host in value:
        if not isinstance(host, str) or not HOST.fullmatch(host):
            raise refusal(
                "allowed_media_domains", host, "hosts as example.org, example.org:8443, 192.0.2.1"
            )
    return tuple(host.lower() for host in value)


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Checked):
    """Pictures in prompts of models with eyes. Raises UserError for other values."""

    # fmt: off
    limit_mm_per_prompt: Mapping[str, int] = option(dict,
        'Pictures of a prompt at most, {"image": 4}; with {"image": 0} a model\'s tower is not '
        "loaded, and text alone runs.",
        group="Pictures", allowed=_limits, kind="json", flag_default=None)
    mm_processor_kwargs: Mapping[str, Any] = option(dict,
        'Options of pictures in place of the model\'s own: {"min_pixels": ..., "max_pixels": ...}, '
        'or {"do_pan_and_scan": true} (Gemma 3).',
        allowed=_options, kind="json", flag_default=None)
    max_image_pixels: int = option(MAX_PIXELS,
        "Pixels of a picture at most, as its file's header says, before it is decoded.",
        allowed=Range(1, MOST_PIXELS))
    max_image_seconds: float = option(10.0,
        "CPU seconds that a picture's file may take to decode and resize, in a process of its own; "
        "one that takes longer is refused.",
        allowed=Range(0.1, 600, whole=False))
    mm_encoder_tp_mode: str = option("data",
        "How several processes share a model's tower. data: each has all of it, and pictures are "
        "dealt out to them.",
        allowed=("data",))
    encoder_budget: int | None = option(None,
        "Patches that go through a tower in a step, beside the token budget, while requests "
        "decode; a pass over more goes on in the next steps. None: as many as the token budget.",
        allowed=COUNT)
    allowed_media_domains: tuple[str, ...] = option((),
        "Hosts that addresses of pictures (http, https) may name, as example.org, or "
        "example.org:8443 for another port; none: no address is fetched.",
        allowed=_hosts, null_words=())
    allowed_local_media_path: str | None = option(None,
        "Folder that addresses file:///... of pictures may lead into, links followed; none: no "
        "file is read by an address.",
        is_file=True)
    # fmt: on

    @property
    def media(self) -> Media:
        """Where pictures may be fetched from."""
        return Media(self.allowed_media_domains, self.allowed_local_media_path)

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
