"""Makes tiny random checkpoints with eyes, and what Hugging Face transformers computes with them.

Needs torch, transformers 5, tokenizers and Pillow; the tests that read the files need only the
last:

    python -m tests.golden_images.make            # everything
    python -m tests.golden_images.make qwen2_vl   # some cases by name

pixels.npz, other_pixels.npz: what processors make of the cases of tests.support.pictures.

One folder per case: the checkpoint as transformers 5 saves it, with a tokenizer of bytes and a chat
template (of most cases qwen2_5_vl's), and

- model.safetensors, or names and shapes, "tensors" of golden.json, of which
  tests.support.made_weights makes it;
- golden.json: "prompts": token ids with one placeholder for each of "pictures" (numbers of
  tests.support.pictures.SIZES), and the "greedy" ids behind them; "min_margin";
- golden.npz: "tower_N" of each picture, the tower's rows, or some of their values (`sampled`);
  "last_logits" of each prompt.

Every parameter is random, norms and biases too. Seeds are searched until no greedy step is close.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import ImageOps
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from predict.loading.checkpoint import Checkpoint
from tests.support.made_weights import write_checkpoint
from tests.support.packed import pack_weights
from tests.support.pictures import (
    NUM_SAMPLED,
    SIZES,
    drawn,
    other_pixel_cases,
    pixel_cases,
    sampled,
)

HERE = Path(__file__).resolve().parent
NUM_NEW_TOKENS = 12
MIN_MARGIN = 2e-2
MAX_SEEDS = 300
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
END, IM_START, IM_END, START, STOP, IMAGE, VIDEO = range(256, 263)
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
QWEN2_5_VL: dict[str, Any] = {
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 264,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 32,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    },
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": STOP,
    "tie_word_embeddings": False,
}
QWEN2_VL = QWEN2_5_VL | {
    "vision_config": {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "mlp_ratio": 2,
    }
}
QWEN3_VL = {
    "text_config": QWEN2_5_VL["text_config"]
    | {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
            "rope_theta": 10000.0,
        },
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
    },
    **{key: value for key, value in QWEN2_5_VL.items() if "config" not in key},
}
QWEN3_VL_MOE = QWEN3_VL | {
    "text_config": QWEN3_VL["text_config"]
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
}


PADDLEOCR_VL = {
    "text_config": {
        **{
            key: value for key, value in QWEN3_VL["text_config"].items() if key != "rope_parameters"
        },
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 20,
    },
    **{key: value for key, value in QWEN2_5_VL.items() if "config" not in key},
}


GEMMA3 = {
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 264,
        "max_position_embeddings": 512,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 24,
        "vision_use_head": False,
        "model_type": "siglip_vision_model",
    },
    "mm_tokens_per_image": 9,
    "image_token_index": IMAGE,
    "boi_token_index": START,
    "eoi_token_index": STOP,
}


MISTRAL3: dict[str, Any] = {
    "text_config": {
        **{
            key: value for key, value in QWEN3_VL["text_config"].items() if key != "rope_parameters"
        },
        "model_type": "mistral",
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 56,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    },
    "image_token_index": IMAGE,
    "tie_word_embeddings": False,
}


TEXT: dict[str, Any] = {**MISTRAL3["text_config"], "model_type": "qwen2", "num_hidden_layers": 2}
INTERNVL = {
    "text_config": TEXT,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": [4, 4],
        "image_size": [16, 16],
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "image_token_id": IMAGE,
    "image_seq_length": 4,
    "tie_word_embeddings": False,
}
LLAVA = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 20,
        "projection_dim": 8,
    },
    "image_token_index": IMAGE,
    "image_seq_length": 25,
    "tie_word_embeddings": False,
}


def qwen_rows(model: Any, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A picture's rows, with those that are added behind layers."""
    made = model.model.visual(inputs["pixel_values"], inputs["image_grid_thw"])
    added = getattr(made, "deepstack_features", None) or ()
    return torch.cat([made.pooler_output, *added], dim=1).numpy()


def paddleocr_rows(model: Any, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A picture's rows."""
    made = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return torch.cat(made.pooler_output).numpy()


def mistral_rows(model: Any, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A picture's rows."""
    made = model.model.get_image_features(inputs["pixel_values"], inputs["image_sizes"])
    return torch.cat(made.pooler_output).numpy()


def mistral_ids(inputs: dict[str, Any], count: int) -> list[int]:
    """A picture's tokens: with one behind each row, and another behind the last."""
    columns = int(inputs["image_sizes"][0][1]) // 8
    rows = [*[IMAGE] * columns, 12] * (count // columns)
    return [*rows[:-1], 13]


def padded(several: list[dict[str, Any]]) -> dict[str, Any]:
    """Pictures of several sizes as one tensor."""
    sizes = torch.cat([torch.as_tensor(each["image_sizes"]) for each in several])
    height, width = sizes.max(0).values.tolist()
    images = [
        torch.nn.functional.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2]))
        for image in (each["pixel_values"] for each in several)
    ]
    return {"pixel_values": torch.cat(images), "image_sizes": sizes}


def joined(several: list[dict[str, Any]]) -> dict[str, Any]:
    """Several pictures as the model reads them."""
    keys = ("pixel_values", "image_grid_thw")
    return {key: torch.cat([each[key] for each in several]) for key in keys if key in several[0]}


def features(model: Any, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A picture's rows, of all its tiles."""
    made = model.model.get_image_features(
        inputs["pixel_values"],
        vision_feature_layer=getattr(model.config, "vision_feature_layer", None),
        vision_feature_select_strategy="default",
    )
    rows = made.pooler_output
    return (torch.cat(rows) if isinstance(rows, list) else rows.flatten(0, 1)).numpy()


def gemma_rows(model: Any, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A picture's rows."""
    made = model.model.get_image_features(inputs["pixel_values"])
    return made.pooler_output.flatten(0, 1).numpy()


PICTURE = [START, IMAGE, STOP]


@dataclass(frozen=True)
class Case:
    """A kind: its classes, a tiny config, and what differs from the others."""

    config: Any
    model: Any
    values: dict[str, Any]
    processor: Any
    rows: Callable[[Any, dict[str, Any]], np.ndarray[Any, Any]] = qwen_rows
    kinds: str = "mm_token_type_ids"  # where the model is told which tokens are pictures'
    joined: Callable[[list[dict[str, Any]]], dict[str, Any]] = joined
    # A picture's tokens, of its inputs and its rows.
    ids: Callable[[dict[str, Any], int], list[int]] = lambda inputs, count: [IMAGE] * count
    options: dict[str, Any] = field(default_factory=dict)  # of a call of the processor
    picture: list[int] = field(default_factory=lambda: PICTURE)  # what stands for one in a prompt
    is_stored: bool = False  # whether the checkpoint is


QWENS = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=3200)
CASES: dict[str, Case] = {
    "qwen2_5_vl": Case(
        *(transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
        *(QWEN2_5_VL, QWENS),
        is_stored=True,
    ),
    "qwen2_vl": Case(
        *(transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
        *(QWEN2_VL, QWENS),
    ),
    "qwen3_vl": Case(
        *(transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
        *(QWEN3_VL, QWENS),
    ),
    "qwen3_vl_moe": Case(
        *(transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration),
        *(QWEN3_VL_MOE, QWENS),
    ),
    "paddleocr_vl": Case(
        *(transformers.PaddleOCRVLConfig, transformers.PaddleOCRVLForConditionalGeneration),
        PADDLEOCR_VL,
        PaddleOCRVLImageProcessorPil(
            patch_size=4, size={"shortest_edge": 64, "longest_edge": 3200}
        ),
        paddleocr_rows,
    ),
    "gemma3": Case(
        *(transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration, GEMMA3),
        Gemma3ImageProcessorPil(size={"height": 24, "width": 24}),
        gemma_rows,
        kinds="token_type_ids",
    ),
    "mistral3": Case(
        *(transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration, MISTRAL3),
        PixtralImageProcessorPil(patch_size={"height": 4, "width": 4}, size={"longest_edge": 56}),
        mistral_rows,
        kinds="",
        joined=padded,
        ids=mistral_ids,
        options={"patch_size": {"height": 8, "width": 8}},
    ),
    "internvl": Case(
        *(transformers.InternVLConfig, transformers.InternVLForConditionalGeneration, INTERNVL),
        GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=5),
        features,
        kinds="",
        picture=[IMAGE],
        ids=lambda inputs, count: [START, *[IMAGE] * count, STOP],
        options={"crop_to_patches": True},
    ),
    "llava": Case(
        *(transformers.LlavaConfig, transformers.LlavaForConditionalGeneration, LLAVA),
        CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": 20, "width": 20}),
        features,
        kinds="",
    ),
}
PROMPTS: tuple[tuple[tuple[Any, ...], ...], ...] = (
    (("text", 7),),
    (("text", 3), ("picture", 0), ("text", 5)),
    (("picture", 1), ("picture", 2), ("picture", 3), ("text", 2)),
    (
        ("text", 4),
        ("picture", 3),
        ("text", 9),
        ("picture", 2),
        ("text", 1),
        ("picture", 3),
        ("text", 6),
    ),
)


def write_tokenizer(folder: Path) -> None:
    """One token for each byte, and the special ones behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def model_of(case: Case, seed: int, tensors: dict[str, list[int]], folder: Path) -> Any:
    """A model whose parameters are all random, rounded to bfloat16.

    folder: with a config.json, which gets the checkpoint. tensors: names and shapes there.
    """
    if not case.is_stored:
        write_checkpoint(folder / "model.safetensors", tensors, seed)
        return case.model.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
    config = case.config(**case.values)
    config._attn_implementation = "eager"
    model = case.model(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if (value.dim() == 1 and "norm" in name) or "ln_q" in name:
            noise = 1 + 0.2 * noise
        elif value.dim() == 1:
            noise = 0.2 * noise
        elif "embed_tokens" not in name:
            noise = noise * 1.3 / np.sqrt(value[0].numel())
        value.data = noise.to(torch.bfloat16).to(torch.float32)
    return model


def expanded(prompt: list[int], pictures: list[list[int]]) -> list[int]:
    """The prompt with all tokens of each picture."""
    left, ids = iter(pictures), list[int]()
    for token in prompt:
        ids += next(left) if token == IMAGE else [token]
    return ids


def attempt(
    case: Case, seed: int, tensors: dict[str, list[int]], folder: Path
) -> dict[str, Any] | None:
    """Writes golden.npz of a seed; None where a greedy step is close."""
    model, rng = model_of(case, seed, tensors, folder), np.random.default_rng(seed)
    inputs = [
        case.processor(drawn(n, size), return_tensors="pt", **case.options)
        for n, size in enumerate(SIZES)
    ]
    with torch.no_grad():
        towers = [case.rows(model, each) for each in inputs]
    prompts, margin, firsts = list[dict[str, Any]](), np.inf, []
    for parts in PROMPTS:
        prompt, pictures = list[int](), []
        for kind, number in parts:
            prompt += case.picture if kind == "picture" else rng.integers(0, 256, number).tolist()
            pictures += [number] * (kind == "picture")
        ids = expanded(prompt, [case.ids(inputs[n], len(towers[n])) for n in pictures])
        given: dict[str, Any] = {}
        if pictures:
            given = case.joined([inputs[number] for number in pictures])
        greedy: list[int] = []
        for _ in range(NUM_NEW_TOKENS):
            tokens = torch.tensor([ids + greedy])
            if pictures and case.kinds:
                # Generated placeholders stand for no picture.
                kinds = torch.zeros_like(tokens)
                kinds[0, : len(ids)] = (tokens[0, : len(ids)] == IMAGE).int()
                given[case.kinds] = kinds
            with torch.no_grad():
                logits = model(input_ids=tokens, use_cache=False, **given).logits[0, -1].numpy()
            if not greedy:
                firsts.append(logits)
            best = np.sort(logits)[-2:]
            margin = min(margin, best[1] - best[0])
            greedy.append(int(logits.argmax()))
            if margin < MIN_MARGIN or greedy[-1] == IMAGE:
                return None
        prompts.append({"prompt": prompt, "pictures": pictures, "greedy": greedy})
    if case.is_stored:
        save(model, folder)
    arrays: dict[str, Any] = {
        f"tower_{number}": rows if case.is_stored else sampled(rows, NUM_SAMPLED)
        for number, rows in enumerate(towers)
    }
    np.savez_compressed(folder / "golden.npz", last_logits=np.stack(firsts), **arrays)
    made = {"seed": seed, "min_margin": float(margin), "prompts": prompts}
    return made if case.is_stored else made | {"tensors": tensors}


def whole_image(made: Any, side: int) -> np.ndarray[Any, Any]:
    """[3, height, width] of PaddleOCR-VL's patches."""
    rows, columns = made["image_grid_thw"][0, 1:]
    patches = made["pixel_values"].reshape(rows, columns, 3, side, side)
    return patches.transpose(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)


def paddleocr_image(image: Any, options: dict[str, int]) -> np.ndarray[Any, Any]:
    processor = PaddleOCRVLImageProcessorPil(**options)
    return whole_image(processor(ImageOps.exif_transpose(image), return_tensors="np"), 14)


def gemma3_image(image: Any, options: dict[str, Any]) -> np.ndarray[Any, Any]:
    processor = Gemma3ImageProcessorPil(**{"size": {"height": 56, "width": 56}, **options})
    made = processor(ImageOps.exif_transpose(image), return_tensors="np")["pixel_values"]
    return np.concatenate(made, axis=1)  # crops, one below the other


def mistral3_image(image: Any, options: dict[str, Any]) -> np.ndarray[Any, Any]:
    sides = {"patch_size": {"height": 28, "width": 28}}
    processor = PixtralImageProcessorPil(**options)
    return processor(ImageOps.exif_transpose(image), return_tensors="np", **sides)["pixel_values"][
        0
    ]


def internvl_image(image: Any, options: dict[str, Any]) -> np.ndarray[Any, Any]:
    processor = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, **options)
    made = processor(ImageOps.exif_transpose(image), return_tensors="np", crop_to_patches=True)
    return np.concatenate(made["pixel_values"], axis=1)  # tiles, one below the other


def llava_image(image: Any, options: dict[str, Any]) -> np.ndarray[Any, Any]:
    sizes = {"size": {"shortest_edge": 42}, "crop_size": {"height": 28, "width": 28}}
    processor = CLIPImageProcessorPil(**sizes)
    return processor(ImageOps.exif_transpose(image), return_tensors="np")["pixel_values"][0]


# The picture that a tower reads, [..., 3, height, width], by kind.
PROCESSED: dict[str, Callable[[Any, dict[str, int]], np.ndarray[Any, Any]]] = {
    "paddleocr_vl": paddleocr_image,
    "gemma3": gemma3_image,
    "mistral3": mistral3_image,
    "internvl": internvl_image,
    "llava": llava_image,
}


def make_other_pixels() -> None:
    """Writes other_pixels.npz: sizes and some values of pictures behind other processors."""
    arrays: dict[str, Any] = {}
    for kind, few in other_pixel_cases().items():
        made = [PROCESSED[kind](image, options) for image, options in few]
        arrays[f"{kind}_shapes"] = np.array([image.shape for image in made])
        arrays[f"{kind}_values"] = np.stack([sampled(image, 40) for image in made])
    np.savez_compressed(HERE / "other_pixels.npz", **arrays)


def save(model: Any, folder: Path) -> None:
    """Writes a checkpoint in bfloat16, whose config.json says float32."""
    model.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").unlink(missing_ok=True)


def make_pixels() -> None:
    """Writes pixels.npz: grids and some values of every case of tests.support.pictures."""
    grids, values = [], []
    for image, options in pixel_cases():
        processor = Qwen2VLImageProcessorPil(**options)
        made = processor(ImageOps.exif_transpose(image), return_tensors="np")
        grids.append(made["image_grid_thw"][0, 1:])
        frames = made["pixel_values"].reshape(len(made["pixel_values"]), 3, 2, 196)
        values.append(sampled(frames[:, :, 0]))
    np.savez_compressed(HERE / "pixels.npz", grids=np.stack(grids), values=np.stack(values))


def make_case(name: str) -> None:
    """Searches a seed and leaves its checkpoint and goldens in the case's folder."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        folder.mkdir()
        save(case.model(case.config(**case.values)), folder)
        tensors = {key: [*each.shape] for key, each in Checkpoint(folder).stored.items()}
        tried = (attempt(case, seed, tensors, folder) for seed in range(MAX_SEEDS))
        golden = next(filter(None, tried), None)
        if golden is None:
            raise SystemExit(f"{name}: no seed below {MAX_SEEDS} has a margin of {MIN_MARGIN}")
        if case.is_stored:
            write_tokenizer(folder)
        else:
            (folder / "model.safetensors").unlink()
        values = json.loads(case.processor.to_json_string()).items()
        saved = {key: value for key, value in values if value is not None}
        (folder / "preprocessor_config.json").write_text(json.dumps(saved, indent=1))
        (folder / "golden.json").write_text(json.dumps(golden))
        shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.copytree(folder, HERE / name, copy_function=shutil.copyfile)
        pack_weights(HERE / name)
    size = sum(path.stat().st_size for path in (HERE / name).iterdir())
    print(f"{name}: seed {golden['seed']}, margin {golden['min_margin']:.3f}, {size / 1000:.0f} kB")


def main() -> None:
    """Makes the named cases, all by default, and pixels.npz."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    names = sys.argv[1:] or [*CASES]
    if len(sys.argv) == 1:
        make_pixels()
        make_other_pixels()
    for case in names:
        make_case(case)


if __name__ == "__main__":
    main()
