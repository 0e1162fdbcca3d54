"""Pictures that tests draw, and their golden checkpoint."""

from __future__ import annotations

import atexit
import base64
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL
import pytest

from predict import SamplingParams
from predict.engine.batch import span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from predict.images.placed import picture_of
from predict.sight import picture_parts
from tests.support.golden import step_logits
from tests.support.made_weights import write_checkpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from predict import LLM
    from predict.images.placed import Picture

# Of tests that compare with what transformers made of pictures.
needs_pillow_of_goldens = pytest.mark.skipif(
    int(PIL.__version__.partition(".")[0]) < 13,
    reason="recorded with Pillow 13: older ones round otherwise where they resize",
)
GOLDEN_IMAGES = Path(__file__).resolve().parents[1] / "golden_images"
IMAGE_CASES = sorted(path.parent.name for path in GOLDEN_IMAGES.glob("*/golden.json"))
# Width and height of the pictures of the goldens: cut windows at both edges, one cell, one row.
NUM_SAMPLED = 300  # of a tower's values
SIZES = ((72, 40), (9, 11), (130, 14), (56, 64))


def drawn(number: int, size: tuple[int, int], mode: str = "RGB") -> Image:
    """A picture of waves and noise, the same for the same number and size."""
    from PIL import Image

    width, height = size
    y, x = np.mgrid[:height, :width]
    rng = np.random.default_rng(number)
    waves = [np.sin(x / (3 + 2 * c + number) + y / (5 + c)) for c in range(4)]
    values = 128 + 90 * np.stack(waves, axis=-1) + rng.normal(0, 20, (height, width, 4))
    rgba = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    return rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode)


MODES = ("RGB", "L", "LA", "P", "P, see-through", "RGBA", "CMYK", "1", "I;16", "I")


def in_mode(image: Image, mode: str) -> Image:
    """An RGBA picture in another mode."""
    from PIL import Image

    if mode == "P, see-through":
        made = image.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
        made.info["transparency"] = 3
        return made
    if mode in ("I;16", "I"):
        values = np.asarray(image.convert("L")).astype(np.uint16) * 2
        return Image.fromarray(values if mode == "I;16" else values.astype(np.int32))
    return image if mode == "RGBA" else image.convert("LA" if mode == "LA" else "RGB").convert(mode)


def turned(image: Image, orientation: int) -> Image:
    """The picture with EXIF's tag of its orientation."""
    image.getexif()[0x0112] = orientation
    return image


def pixel_cases() -> Iterator[tuple[Image, dict[str, int]]]:
    """Pictures of random shapes in all modes and orientations, and options of the processor."""
    rng = np.random.default_rng(48)
    for number in range(40):
        width, height = (int(side) for side in np.exp(rng.uniform(0.7, 5, 2)))
        image = in_mode(drawn(number, (width, height), "RGBA"), MODES[number % len(MODES)])
        least = int(rng.integers(1, 5)) * 1000
        yield (
            turned(image, number % 9) if number % 9 else image,
            {
                "min_pixels": least,
                "max_pixels": least * int(rng.integers(2, 9)),
            },
        )


PAN_AND_SCAN: dict[str, Any] = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 8,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.3,
}


def other_pixel_cases() -> dict[str, list[tuple[Image, dict[str, Any]]]]:
    """By kind a few of pixel_cases, each with the options that its processor has."""
    few = [*pixel_cases()][::3]
    images = [image for image, _ in few]
    return {
        "paddleocr_vl": few,
        "gemma3": [(each, PAN_AND_SCAN if n % 2 else {}) for n, each in enumerate(images)],
        "mistral3": [(each, {"size": {"longest_edge": 84}}) for each in images],
        "internvl": [(each, {"max_patches": 7} if n % 2 else {}) for n, each in enumerate(images)],
        "llava": [(each, {}) for each in images],
    }


def sampled(values: NDArray[np.float32], count: int = 60) -> NDArray[np.float32]:
    """Some of the values, the same for the same number of them."""
    flat = values.reshape(-1)
    return flat[np.random.default_rng(1).integers(0, len(flat), count)]


def png_url(image: Image) -> str:
    """A picture as a data URL."""
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# What kinds call the tokens around a picture.
SPELLED = {"internvl": {"<|vision_start|>": "<img>", "<|vision_end|>": "</img>"}}


@cache
def image_model(case: str) -> Path:
    """The folder of a case's checkpoint; of most cases it is made."""
    stored = GOLDEN_IMAGES / case
    golden = image_golden(case)
    if "tensors" not in golden:
        return stored
    made = Path(tempfile.mkdtemp(prefix="images-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        text = (GOLDEN_IMAGES / "qwen2_5_vl" / name).read_text()
        for old, new in SPELLED.get(case, {}).items():
            text = text.replace(old, new)
        (made / name).write_text(text)
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copyfile(stored / name, made / name)
    write_checkpoint(made / "model.safetensors", golden["tensors"], golden["seed"])
    return made


@cache
def image_golden(case: str) -> dict[str, Any]:
    """The prompts and answers of a case."""
    return json.loads((GOLDEN_IMAGES / case / "golden.json").read_text())


def pictures_of(prompt: dict[str, Any]) -> list[Image]:
    """The pictures of a golden's prompt."""
    return [drawn(number, SIZES[number]) for number in prompt["pictures"]]


def asked_of(case: str = "qwen2_5_vl") -> list[dict[str, Any]]:
    """The prompts of a golden, as generate takes them."""
    return [
        {"prompt": each["prompt"], "multi_modal_data": {"image": pictures_of(each)}}
        for each in image_golden(case)["prompts"]
    ]


def check_greedy_of(llm: LLM, case: str = "qwen2_5_vl") -> None:
    """Asserts that the answers to a golden's prompts are its own, and that nothing is lost."""
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    outputs = llm.generate(asked_of(case), params)
    wanted = [each["greedy"] for each in image_golden(case)["prompts"]]
    assert [list(output.token_ids) for output in outputs] == wanted
    llm.engine.scheduler.check()


def encoded(llm: LLM, picture: Picture) -> NDArray[np.float32]:
    """A tower's rows of a picture."""
    from predict.nn.tower import encode

    tower, platform = llm.parts.sight.tower, llm.platform
    assert tower is not None
    dtype = llm.config.model.dtype
    grids = [picture.grid] * picture.num_tiles
    made = encode(*(platform.backend, tower, picture.patches, grids, dtype, platform.place))
    return np.asarray(made.cpu().astype("float32").numpy())


def check_towers_and_logits_of(llm: LLM, case: str) -> None:
    """The same of rows of the golden's pictures, too, of a model of float32 in this process."""
    golden, sight = np.load(GOLDEN_IMAGES / case / "golden.npz"), llm.parts.sight
    assert sight.reader is not None
    for number, size in enumerate(SIZES):
        rows = encoded(llm, picture_of(drawn(number, size), sight.reader.pixels))
        wanted = golden[f"tower_{number}"]
        _close(rows if wanted.ndim > 1 else sampled(rows, NUM_SAMPLED), wanted)
    check_logits_of(llm, case)


def check_logits_of(llm: LLM, case: str) -> None:
    """Asserts that logits of a golden's prompts, in one step, are transformers'."""
    sight, spans, start = llm.parts.sight, [], 0
    assert sight.rows is not None
    assert sight.eyes is not None
    for number, prompt in enumerate(asked_of(case)):
        parts = picture_parts(prompt["multi_modal_data"])
        ids, pictures = sight.read(prompt["prompt"], parts, llm.tokenizer)
        request = Request(number, ids, SamplingParams(), pictures=pictures)
        sight.rows.hold(request, 0)
        spans.append(ScheduledSpan(request, len(ids), 0, list(range(start, start + 16)), True))
        start += 16
    inputs = sight.eyes.seen(span_inputs(spans, 16), spans)
    wanted = np.load(GOLDEN_IMAGES / case / "golden.npz")["last_logits"]
    _close(step_logits(llm, inputs), wanted)
    for span in spans:
        sight.rows.release(span.request)


def _close(got: NDArray[Any], wanted: NDArray[Any]) -> None:
    tolerance = 1e-4 * np.abs(wanted).max()
    np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=0)
