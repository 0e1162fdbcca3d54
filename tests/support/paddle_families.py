"""Golden checkpoints as PaddleNLP saves them: its names, matrices [in, out], its config.json.

Written from PaddleNLP's own tables (`_get_name_mappings` and the configuration classes), not from
what reads them here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.loading.checkpoint import Checkpoint
from predict.loading.safetensors_writer import write
from tests.support.golden import GOLDEN
from tests.support.stored_formats import Tensors, paddle_file

Stored = dict[str, tuple[str, npt.NDArray[Any]]]  # dtype of safetensors, values
LLAMA_LINEARS = r"(q|k|v|o|gate|up|down)_proj|lm_head"
GLM_LINEARS = r"query_key_value|dense|dense_h_to_4h|dense_4h_to_h"
OPT_MODULES = (
    (r"decoder\.embed_tokens", "embeddings.word_embeddings"),
    (r"decoder\.embed_positions", "embeddings.position_embeddings"),
    (r"decoder\.project_in", "embeddings.project_in"),
    (r"(layers\.\d+)\.self_attn_layer_norm", r"\1.norm1"),
    (r"(layers\.\d+)\.final_layer_norm", r"\1.norm2"),
    (r"(layers\.\d+)\.fc1", r"\1.linear1"),
    (r"(layers\.\d+)\.fc2", r"\1.linear2"),
)
OPT_CONFIG = {
    "do_layer_norm_before": "normalize_before",
    "ffn_dim": "intermediate_size",
    "activation_function": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_std": "initializer_range",
}


@dataclass(frozen=True)
class Paddle:
    """How PaddleNLP has a family.

    base: what names begin with in Hugging Face's files, and in PaddleNLP's. turned: the modules
    whose weights are [in, out]. modules: renamed ones. fields: renamed ones of config.json; values:
    what it has besides; dropped: fields that it has not.
    """

    base: tuple[str, str]
    turned: str
    modules: tuple[tuple[str, str], ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    has_base: bool = True

    def name(self, name: str) -> str:
        """PaddleNLP's name of Hugging Face's."""
        for module, other in self.modules:
            name = re.sub(rf"{module}\b", other, name)
        theirs, ours = self.base
        if not self.has_base:
            return ours + name
        return ours + name.removeprefix(theirs) if name.startswith(theirs) else name

    def config(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """PaddleNLP's config.json of Hugging Face's."""
        kept = {self.fields.get(key, key): values[key] for key in values if key not in self.dropped}
        dtype = kept.pop("torch_dtype", "float32")
        return {**kept, "dtype": dtype, "paddlenlp_version": None, **self.values}


OPT = Paddle(
    ("model.", "opt."),
    r"(q|k|v|out)_proj|linear[12]|project_(in|out)",
    OPT_MODULES,
    OPT_CONFIG,
    {"type_vocab_size": 16, "mp_degree": 1, "fuse_attention_qkv": False},
    ("_remove_final_layer_norm", "layer_norm_elementwise_affine", "enable_bias", "layerdrop"),
)
BLOOM = Paddle(
    ("transformer.", "bloom."),
    GLM_LINEARS,
    fields={"num_attention_heads": "n_head", "n_embed": "hidden_size"},
    values={"use_long_sequence_strategies": False, "long_sequence_init_args": {}},
    dropped=("n_inner", "offset_alibi", "bias_dropout_fusion", "skip_bias_add"),
    has_base=False,
)
CHATGLM2 = Paddle(
    ("transformer.", "chatglm_v2."),
    rf"{GLM_LINEARS}|output_layer",
    fields={"num_layers": "num_hidden_layers", "seq_length": "max_sequence_length"},
    values={"model_type": "chatglm_v2", "architectures": ["ChatGLMv2ForCausalLM"]},
    dropped=("multi_query_attention", "original_rope", "padded_vocab_size"),
)
BAICHUAN: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
LLAMA_VALUES: dict[str, Any] = {
    "alibi": False,
    "rope_scaling_factor": 1.0,
    "rope_scaling_type": None,
    "seq_length": 2048,
    "fuse_attention_qkv": False,
    "fuse_attention_ffn": False,
}
FAMILIES: dict[str, Paddle] = {
    "opt_125m": OPT,
    "opt_350m": OPT,
    "bloom_7b": BLOOM,
    "qwen_7b": Paddle(("transformer.", "qwen."), r"c_attn|c_proj|w1|w2|lm_head"),
    "qwen_long": Paddle(("transformer.", "qwen."), r"c_attn|c_proj|w1|w2|lm_head"),
    "chatglm_6b": Paddle(
        ("transformer.", "chatglm.transformer."),
        GLM_LINEARS,
        (("lm_head.weight", "lm_head.decoder_weight"),),
        {"num_layers": "num_hidden_layers"},
        {"attention_scale": True, "activation": "gelu", "output_predict": True},
    ),
    "chatglm_2_6b": CHATGLM2,
    "baichuan_7b": Paddle(("model.", "llama."), LLAMA_LINEARS, values={**BAICHUAN, **LLAMA_VALUES}),
    "baichuan_13b": Paddle(
        ("model.", "llama."),
        LLAMA_LINEARS,
        fields={"model_max_length": "max_position_embeddings"},
        values={**BAICHUAN, **LLAMA_VALUES, "alibi": True},
    ),
    "baichuan_2_13b": Paddle(
        ("model.", "llama."),
        LLAMA_LINEARS,
        fields={"model_max_length": "max_position_embeddings"},
        values={**BAICHUAN, **LLAMA_VALUES, "alibi": True},
        dropped=("z_loss_weight",),
    ),
    "gemma_2b": Paddle(("model.", "gemma."), LLAMA_LINEARS, values=LLAMA_VALUES),
    "mixtral_8x7b": Paddle(("model.", "mixtral."), rf"{LLAMA_LINEARS}|gate|w[123]"),
    "qwen2_moe_a2_7b": Paddle(
        ("model.", "qwen2_moe."),
        rf"{LLAMA_LINEARS}|gate|shared_expert_gate",
        dropped=("qkv_bias", "layer_types", "mlp_only_layers"),
    ),
}


def tensors_of(case: str) -> Stored:
    """A golden checkpoint's tensors as PaddleNLP has them."""
    paddle = FAMILIES[case]
    turned = re.compile(rf"(.*\.)?({paddle.turned})\.weight")
    made: Stored = {}
    for name, (dtype, values) in _as_llama(case).items():
        known = paddle.name(name)
        made[known] = (dtype, np.ascontiguousarray(values.T if turned.fullmatch(known) else values))
    return made


def _as_llama(case: str) -> Stored:
    """The checkpoint's tensors, Baichuan's as those of the Llama that PaddleNLP has of it."""
    made: Stored = {}
    for name, array in Checkpoint(GOLDEN / case).stored.items():
        values = np.asarray(array.read(), order="C")
        if name.endswith("W_pack.weight"):
            for kind, part in zip("qkv", np.split(values, 3), strict=True):
                made[name.replace("W_pack", f"{kind}_proj")] = array.dtype, part
        elif name == "lm_head.weight" and case == "baichuan_2_13b":
            floats = (values.astype(np.uint32) << 16).view(np.float32)
            made[name] = "F32", floats / np.linalg.norm(floats, axis=1, keepdims=True)
        else:
            made[name] = array.dtype, values
    return made


def older(tensors: Tensors) -> Tensors:
    """PaddleNLP's first checkpoints of ChatGLM2, of the later ones."""
    made: Tensors = {}
    for name, values in tensors.items():
        if "query_key_value" in name:
            cuts = np.split(values, [32, 48], axis=-1)
            for part, cut in zip(("query", "key", "value"), cuts, strict=True):
                made[name.replace("query_key_value", part)] = cut
        elif "dense_h_to_4h" in name:
            turns = values.reshape(len(values), 2, -1).swapaxes(1, 2)
            made[name] = turns.reshape(values.shape)
        else:
            made[name] = values
    return made


def write_config(folder: Path, case: str, **changes: Any) -> None:
    """PaddleNLP's config.json."""
    values = json.loads((GOLDEN / case / "config.json").read_text())
    text = json.dumps({**FAMILIES[case].config(values), **changes})
    (folder / "config.json").write_text(text)


def write_params(folder: Path, tensors: Stored) -> None:
    data = paddle_file({name: values for name, (_, values) in tensors.items()})
    (folder / "model_state.pdparams").write_bytes(data)


def write_safetensors(folder: Path, tensors: Stored) -> None:
    """PaddleNLP's model.safetensors."""
    write(folder / "model.safetensors", tensors, {"format": "np"})


WRITERS = {"pdparams": write_params, "safetensors": write_safetensors}
