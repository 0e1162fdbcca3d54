"""Which model runs, where, and by which operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from predict.errors import UserError
from predict.system.flag import not_yet
from predict.system.options import Checked, option
from predict.system.ranges import SEED

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(DTYPE_BYTES)
AUTO = "auto"  # the checkpoint's own
# In the order in which sentence-transformers joins those that a file asks for together.
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
YES_NO = "yes_no"  # in the place of a pooling: a reranker that answers yes or no
MODEL_TYPES = ("gpt-3", "ernie-3.5-se", "llama-img2txt", "qwen-img2txt", "opt-img2txt")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """Which model runs, where, and by which operators. Raises UserError for other values."""

    # fmt: off
    model_name_or_path: str = option(help=
        "Directory of the checkpoint, a GGUF file or, with --mode static, directory of the "
        "exported model. A hub name is found in $REGATTA_MODEL_DIR and in the local Hugging Face "
        "and PaddleNLP caches; nothing is downloaded. Required.",
        group="Model", is_file=True)
    dtype: str = option(AUTO,
        "Type of weights, activations and KV cache. auto, as when not given, is the checkpoint's, "
        "or that of --avx_type or a PaddleNLP adapter; in static mode the exported model's.",
        allowed=(*DTYPES, AUTO), flag_default=None, null_words=(AUTO, "none", ""))
    load_format: str = option("auto",
        "auto reads the checkpoint; dummy makes seeded random weights from config.json alone.",
        allowed=("auto", "dummy"))
    model_prefix: str = option("model",
        "Stem of the exported program's files, in static mode.", is_file=True)
    model_type: str | None = option(None,
        "Family of the model, where its config.json has no model_type.",
        choices=MODEL_TYPES,
        availability=not_yet("Text models run, and the text models of gemma3 and mistral3.",
                             "*-img2txt"))
    chat_template: str | None = option(None,
        "The tokenizer's own template, or its family's, when not given; none turns it off; else a "
        "template file, a directory with one, or the name of a published format.",
        is_file=True, null_words=())
    pooling: str | None = option(None,
        "How the hidden states of a text become its vector, where the model's files "
        "(modules.json) do not say; yes_no: a reranker that answers yes or no, as Qwen3-Reranker.",
        allowed=(*POOLINGS, YES_NO), null_words=())
    device: str = option("cpu",
        "cpu, gpu, gpu:N, or another type that the installed Paddle has (xpu, npu, npu:1, ...), "
        "which runs the plain operators. The flag when not given: gpu where one is usable and the "
        "compiled operators run, else cpu; an exported model runs where it was exported for.",
        group="Device and mode", flag_default="gpu")
    mode: str = option("dynamic",
        "dynamic runs the checkpoint; static runs what export/export_model.py wrote.",
        allowed=("dynamic", "static"))
    inference_model: bool | None = option(None,
        "Use the compiled, fused operators where they are built; false: the plain-Paddle ones. "
        "When not given: the compiled ones, but on a CPU the plain ones for weights that these do "
        "not compute with. In static mode it is the exported model's.",
        group="Operators and cache")
    batch_invariant: bool = option(False,
        "On a GPU, give a request the same text to the last bit whatever is beside it, with and "
        "without drafts, at some cost; the compiled operators of the CPU always do.")
    mla_use_matrix_absorption: bool | None = option(None,
        "DeepSeek's attention over latents themselves (true), or over keys and values that are "
        "made of them (false); when not given, whichever takes fewer products, but over latents "
        "with --batch_invariant. On a GPU false is as when not given: long spans alone, on "
        "Hopper. In static mode it is the exported model's.")
    seed: int = option(0, "Same seed and flags, same output.", group="Sampling", allowed=SEED)
    lora_path: str | None = option(None,
        "Directory of a LoRA adapter, PaddleNLP's or PEFT's: added to the weights while they are "
        "read, ahead of any rounding.",
        group="Adapters", is_file=True)
    # fmt: on

    def __post_init__(self) -> None:
        from predict.device.devices import check_static, kind_of  # slow, and --help needs none

        super().__post_init__()
        kind_of(self.device)
        if self.lora_path is not None and self.load_format == "dummy":
            raise UserError(
                "load_format dummy makes weights up, and lora_path changes those of a checkpoint; "
                "give one of the two"
            )
        if self.lora_path is not None and self.mode == "static":
            raise UserError(
                "mode static runs weights that were exported, and lora_path changes a checkpoint; "
                "export the model with --lora_path"
            )
        if self.mode == "static":
            check_static(self.device)

    @property
    def latent_form(self) -> Literal["cheaper", "absorbed", "expanded"]:
        """Of latent attention; batch-invariant: one for all, so that sums keep their order."""
        absorbs = self.mla_use_matrix_absorption
        if absorbs is None:
            return "absorbed" if self.batch_invariant else "cheaper"
        return "absorbed" if absorbs else "expanded"
