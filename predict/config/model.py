"""Which model runs, where, and by which operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from predict.config.checks import check_fields
from predict.device.devices import check_static, kind_of
from predict.errors import UserError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(DTYPE_BYTES)
MODES = ("dynamic", "static")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model runs, where, and by which operators. Raises UserError for other values."""

    model_name_or_path: str  # directory of a model, or of an exported one; a GGUF file
    dtype: str = "float32"  # float32 | bfloat16 | float16
    device: str = "cpu"  # cpu | gpu | gpu:N | another type that Paddle has registered
    mode: str = "dynamic"  # dynamic | static
    model_prefix: str = "model"  # stem of the exported program
    inference_model: bool = False  # compiled operators; False: plain-Paddle ones
    batch_invariant: bool = False  # on a GPU: every row's sums in an order of their own
    # Latent attention: True absorbed, False expanded, always; None: whichever takes fewer products.
    # A GPU takes False as None.
    mla_use_matrix_absorption: bool | None = None
    model_type: str | None = None  # the family, where config.json names none: gpt-3, ernie-3.5-se
    load_format: str = "auto"  # auto | dummy (seeded random weights)
    lora_path: str | None = None  # directory of a LoRA adapter, merged while the weights are read
    # None: the tokenizer's own or its family's; none: off; else a file, a folder or a format's name
    chat_template: str | None = None
    seed: int = 0  # of sampling, and of random weights

    def __post_init__(self) -> None:
        check_fields(
            self,
            choices={"dtype": DTYPES, "mode": MODES, "load_format": LOAD_FORMATS},
            files=("model_name_or_path", "model_prefix", "chat_template", "lora_path"),
        )
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
