"""What a model's files say of vectors and scores: sentence-transformers' files, and its heads.

modules.json lists the modules behind the network, each with a folder: pooling, dense layers, a
length of 1. A classification head is part of the checkpoint. What a file asks for and is not done
here is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from predict.config.model import POOLINGS, YES_NO
from predict.device.place import to_float32
from predict.errors import UserError, quoted
from predict.gguf.files import gguf_of
from predict.loading.checkpoint import Checkpoint
from predict.loading.safetensors_reader import read_header
from predict.loading.safetensors_writer import write
from predict.nn.hf_config import FUNCTIONS as CONFIG_FUNCTIONS
from predict.nn.hf_config import ConfigReader
from predict.nn.pooling import FUNCTIONS, Dense, Pooler
from predict.nn.spec import DecoderSpec
from predict.system.bounds import is_integer
from predict.system.files import json_type, read_json, read_json_object

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
# Of the network's module, by the class that wrote it; the first that is there counts.
LENGTHS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
SAVED, SAVED_TENSORS = "pooling.json", "pooling.safetensors"  # of an export: all of it
MAX_MODULES, MAX_PROMPTS = 16, 256
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")  # sentence-transformers'
# sentence-transformers' names of poolings in 1_Pooling/config.json, and ours.
_POOLINGS = {
    "cls": "cls",
    "cls_token": "cls",
    "max": "max",
    "max_tokens": "max",
    "mean": "mean",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "last",
}
_TORCH = {
    "Identity": "identity",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "ReLU": "relu",
    "SiLU": "silu",
    "GELU": "gelu",
}


@dataclass(frozen=True)
class PoolingFiles:
    """What a model's files say.

    embed: to vectors; None: they name no pooling. score: a classification head of one label, on a
    text, or on a pair of them; num_labels: of a head. answers: a score is the answer yes or no.
    prompts: texts put in front, by name.
    """

    embed: Pooler | None = None
    score: Pooler | None = None
    num_labels: int = 0
    answers: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    counts_prompt: bool = True  # its tokens count for means
    max_length: int | None = None  # tokens; longer texts are cut
    similarity: str = "cosine"  # of SIMILARITIES: what a score of two vectors is


def read_pooling(
    directory: str | Path, spec: DecoderSpec, pooling: str | None = None
) -> PoolingFiles:
    """What a folder's files say, and the flag --pooling where they name none.

    Raises UserError, naming file and key, for what is not done, and for files that say otherwise.
    """
    found = _of_files(directory, spec)
    if pooling is None or (pooling == YES_NO and found.answers):
        return found
    if pooling == YES_NO and found.num_labels:
        raise UserError(
            f"--pooling {YES_NO} was given, and the checkpoint has a classification head; leave "
            "the flag out"
        )
    if found.embed is None and pooling == YES_NO:
        return replace(found, answers=True)
    if found.embed is None:
        return replace(found, embed=Pooler((pooling,), normalize=True))
    if found.embed.poolings != (pooling,):
        raise UserError(
            f"--pooling {pooling} was given, and the model's modules.json names "
            f"{', '.join(found.embed.poolings)}; leave the flag out"
        )
    return found


def _of_files(directory: str | Path, spec: DecoderSpec) -> PoolingFiles:
    folder = Path(directory)
    if gguf_of(directory) is not None:
        return PoolingFiles()
    if (folder / SAVED).is_file():
        return _load(folder)
    found = PoolingFiles()
    if (folder / MODULES).is_file():
        found = _with_prompts(_of_modules(folder, spec.hidden_size), folder)
    reader = ConfigReader.from_dir(directory)
    architectures = reader.values.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise reader.wrong("architectures", "a list of names")
    kind = str(architectures[0]).partition("For")
    if _answers(reader):
        found = replace(found, answers=True)
    elif kind[2] == "SequenceClassification":
        found = _with_head(found, folder, spec, reader)
    return found


def _answers(reader: ConfigReader) -> bool:
    """Whether config.json has the two keys that vLLM's users give for Qwen3-Reranker."""
    tokens, original = (reader.values.get(key) for key in _ANSWERS)
    if tokens is None and not original:
        return False
    said = (tokens, ["no", "yes"]), (original, True)
    for key, (value, allowed) in zip(_ANSWERS, said, strict=True):
        if value != allowed:
            raise reader.wrong(key, f"{json.dumps(allowed)}, with {' and '.join(_ANSWERS)}")
    return True


_ANSWERS = ("classifier_from_token", "is_original_qwen3_reranker")


def _of_modules(folder: Path, size: int) -> PoolingFiles:
    path = folder / MODULES
    listed = read_json(path)
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_MODULES:
        raise UserError(f"{path} is {json_type(listed)} (allowed: a list of 1 to {MAX_MODULES})")
    files, pooler = PoolingFiles(), None
    for number, module in enumerate(listed):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise UserError(f"{path}: entry {number} has no type (allowed: an object with type)")
        kind, at = module["type"].rpartition(".")[2], module.get("path", "")
        if not isinstance(at, str) or "/" in at.rstrip("/") or at.startswith("."):
            raise UserError(f"{path}: path is {quoted(at)} (allowed: a folder of the model)")
        where = folder / at
        if kind == "Transformer" and not number:
            if at not in ("", "./"):
                raise UserError(
                    f"{path}: the network lies in {quoted(at)} (allowed: beside {MODULES}); move "
                    "its files there, and set path to an empty text"
                )
        elif kind == "Pooling" and pooler is None and number:
            pooler, counts = _pooling(where / "config.json", size)
            files, size = replace(files, counts_prompt=counts), size * len(pooler.poolings)
        elif kind == "Dense" and pooler is not None and not pooler.normalize:
            layer = _dense(where, size)
            pooler, size = replace(pooler, layers=(*pooler.layers, layer)), len(layer.weight)
        elif kind == "Normalize" and pooler is not None:
            pooler = replace(pooler, normalize=True)
        else:
            raise UserError(
                f"{path}: module {number} is {quoted(module['type'])} (allowed: Transformer, then "
                "Pooling, then Dense, then Normalize, each of them once and Dense more often); "
                "nothing here does what it does"
            )
    return replace(files, embed=pooler)


def _pooling(path: Path, size: int) -> tuple[Pooler, bool]:
    """The pooling of a module's config.json, and whether a prompt's tokens count."""
    values = read_json_object(path)
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if values.get(key) is not None:
            _check_width(path, key, values[key], size)
    names: list[str] = []
    unknown = [key for key in values if key.startswith("pooling_mode_")]
    for key in list(unknown):
        if key.removeprefix("pooling_mode_") in _POOLINGS:
            unknown.remove(key)
            if values[key] is True:
                names.append(_POOLINGS[key.removeprefix("pooling_mode_")])
            elif values[key] is not False:
                raise UserError(f"{path}: {key} is {quoted(values[key])} (allowed: true, false)")
    given = values.get("pooling_mode")
    for name in [given] if isinstance(given, str) else given if isinstance(given, list) else []:
        if not isinstance(name, str) or name not in _POOLINGS:
            raise UserError(f"{path}: pooling_mode is {quoted(name)} (allowed: {_known()})")
        names.append(_POOLINGS[name])
    unknown = [key for key in unknown if values[key]]
    if unknown or not names:
        raise UserError(
            f"{path}: {unknown[0] if unknown else 'no pooling_mode'} is true (allowed: {_known()})"
        )
    counts = values.get("include_prompt", True)
    if not isinstance(counts, bool):
        raise UserError(f"{path}: include_prompt is {quoted(counts)} (allowed: true, false)")
    return Pooler(tuple(name for name in POOLINGS if name in names)), counts


def _known() -> str:
    return ", ".join(_POOLINGS)


def _dense(folder: Path, size: int) -> Dense:
    path = folder / "config.json"
    values = read_json_object(path)
    name = str(values.get("activation_function", "torch.nn.modules.activation.Tanh"))
    function = _TORCH.get(name.rpartition(".")[2].removesuffix("()"))
    if function is None:
        raise UserError(
            f"{path}: activation_function is {quoted(name)} (allowed: {', '.join(_TORCH)})"
        )
    checkpoint, has_bias = Checkpoint(folder), values.get("bias", True)
    _check_width(path, "in_features", values.get("in_features"), size)
    rows: Any = values.get("out_features")
    if not (is_integer(rows) and rows > 0):
        raise UserError(f"{path}: out_features is {quoted(rows)} (allowed: 1 and more)")
    shape = rows, size
    if not isinstance(has_bias, bool):
        raise UserError(f"{path}: bias is {quoted(has_bias)} (allowed: true, false)")
    return Dense(
        _tensor(checkpoint, "linear.weight", shape),
        _tensor(checkpoint, "linear.bias", shape[:1]) if has_bias else None,
        function,
    )


def _check_width(path: Path, key: str, value: Any, size: int) -> None:
    if not (is_integer(value) and value == size):
        raise UserError(
            f"{path}: {key} is {quoted(value)} (allowed: {size}, the values of what comes before)"
        )


def _tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Any:
    found = checkpoint.tensors.get(name)
    if found is None or found.shape != shape:
        got = "is missing" if found is None else f"has the shape {list(found.shape)}"
        raise UserError(f"{checkpoint.directory}: {name} {got} (allowed: {list(shape)})")
    return np.ascontiguousarray(to_float32(checkpoint.read(name)))


def _with_prompts(files: PoolingFiles, folder: Path) -> PoolingFiles:
    path = folder / PROMPTS
    values = read_json_object(path, missing_ok=True)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if (
        not isinstance(prompts, dict)
        or len(prompts) > MAX_PROMPTS
        or not all(isinstance(each, str) for each in prompts.values())
    ):
        raise UserError(f"{path}: prompts is {json_type(prompts)} (allowed: texts by name)")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise UserError(
            f"{path}: default_prompt_name is {quoted(default)} (allowed: {', '.join(prompts)})"
        )
    similarity = values.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise UserError(
            f"{path}: similarity_fn_name is {quoted(similarity)} (allowed: "
            f"{', '.join(SIMILARITIES)})"
        )
    files = replace(files, similarity=similarity)
    path = next((p for name in LENGTHS if (p := folder / name).is_file()), folder / LENGTHS[0])
    values = read_json_object(path, missing_ok=True)
    if values.get("do_lower_case"):
        raise UserError(
            f"{path}: do_lower_case is {quoted(values['do_lower_case'])} (allowed: false); texts "
            "are cut as tokenizer.json says: lower them there, or yourself"
        )
    length = values.get("max_seq_length")
    if length is not None and not (type(length) is int and length > 0):
        raise UserError(f"{path}: max_seq_length is {quoted(length)} (allowed: 1 and more)")
    return replace(files, prompts=prompts, default_prompt=default, max_length=length)


def _with_head(
    files: PoolingFiles, folder: Path, spec: DecoderSpec, reader: ConfigReader
) -> PoolingFiles:
    """With the checkpoint's classification head, whose tensors say what it is."""
    checkpoint, hidden = Checkpoint(folder), spec.hidden_size
    names = checkpoint.tensors
    weight = next((n for n in _OUTPUTS if f"{n}.weight" in names), None)
    if weight is None:
        raise UserError(
            f"{folder}: config.json names a classification model, and its head is missing (looked "
            f"for {', '.join(_OUTPUTS)}); complete the download"
        )
    num_labels = next(iter(names[f"{weight}.weight"].shape), 0)
    if num_labels < 1:
        raise UserError(f"{folder}: {weight}.weight has no row for a label; copy the model again")

    def dense(name: str, function: str, rows: int = hidden) -> Dense:
        bias = f"{name}.bias"
        return Dense(
            _tensor(checkpoint, f"{name}.weight", (rows, hidden)),
            _tensor(checkpoint, bias, (rows,)) if bias in names else None,
            function,
        )

    layers, pooling = list[Dense](), "cls"
    if weight == "score":
        pooling = "last"
    elif weight == "classifier.out_proj":
        layers.append(dense("classifier.dense", "tanh"))
    elif "head.dense.weight" in names:
        pooling = reader.get_str("classifier_pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise reader.wrong("classifier_pooling", "cls, mean")
        made = dense("head.dense", _function(reader, "classifier_activation", "gelu"))
        factor = _tensor(checkpoint, "head.norm.weight", (hidden,))
        there = "head.norm.bias" in names
        bias = _tensor(checkpoint, "head.norm.bias", (hidden,)) if there else None
        epsilon = reader.get_float("norm_eps", 1e-5)
        layers.append(replace(made, norm=(factor, bias, epsilon)))
    else:
        pooler = next(
            (n.removesuffix(".weight") for n in names if n.endswith("pooler.dense.weight")),
            "pooler",
        )
        layers.append(dense(pooler, "tanh"))
    layers.append(dense(weight, _label_function(reader), num_labels))
    score = Pooler((pooling,), tuple(layers))
    return replace(files, score=score if num_labels == 1 else None, num_labels=num_labels)


_OUTPUTS = ("score", "classifier.out_proj", "classifier")


def _function(reader: ConfigReader, key: str, default: str) -> str:
    found = CONFIG_FUNCTIONS.get(reader.get_str(key, default))
    if found not in FUNCTIONS:
        raise reader.wrong(key, ", ".join(FUNCTIONS))
    return str(found)


def _label_function(reader: ConfigReader) -> str:
    """Of the one label's value: sentence-transformers' part of config.json says it, or sigmoid."""
    own = reader.values.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or reader.values.get("sbert_ce_default_activation_function")
    if name is None:
        return "sigmoid"
    function = _TORCH.get(str(name).rpartition(".")[2].removesuffix("()"))
    if function is None:
        raise UserError(
            f"{reader.path}: activation_fn is {quoted(name)} (allowed: {', '.join(_TORCH)})"
        )
    return function


_SAID = (
    *("num_labels", "answers", "prompts", "default_prompt", "counts_prompt", "max_length"),
    "similarity",
)


def save_pooling(files: PoolingFiles, folder: Path) -> None:
    """Writes all of it into an export's folder."""
    tensors: dict[str, Any] = {"none": np.zeros(1, np.float32)}  # a file holds one at least

    def described(pooler: Pooler | None, name: str) -> Any:
        if pooler is None:
            return None
        layers: list[dict[str, Any]] = []
        for number, layer in enumerate(pooler.layers):
            factor, bias, epsilon = layer.norm or (None, None, None)
            parts = (layer.weight, layer.bias, factor, bias)
            there = {p: v for p, v in zip(_PARTS, parts, strict=True) if v is not None}
            tensors.update({f"{name}.{number}.{part}": value for part, value in there.items()})
            layers.append({"function": layer.function, "epsilon": epsilon, "parts": [*there]})
        return {"poolings": pooler.poolings, "layers": layers, "normalize": pooler.normalize}

    said = {name: described(getattr(files, name), name) for name in ("embed", "score")}
    said |= {name: getattr(files, name) for name in _SAID}
    (folder / SAVED).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    stored = {name: ("F32", np.ascontiguousarray(v, np.float32)) for name, v in tensors.items()}
    write(folder / SAVED_TENSORS, stored)


_PARTS = ("weight", "bias", "factor", "norm_bias")


def _load(folder: Path) -> PoolingFiles:
    """What `save_pooling` wrote. Raises UserError for a file that it did not."""
    path = folder / SAVED
    said, stored = read_json_object(path), read_header(folder / SAVED_TENSORS)

    def pooler(name: str) -> Pooler | None:
        match said[name]:
            case None:
                return None
            case {"poolings": list(poolings), "layers": list(layers), "normalize": bool(unit)}:
                made = tuple(dense(f"{name}.{i}", layer) for i, layer in enumerate(layers))
                if poolings and set(poolings) <= set(POOLINGS):
                    return Pooler(tuple(poolings), made, unit)
        raise ValueError(name)

    def dense(at: str, layer: Any) -> Dense:
        parts = {part: stored[f"{at}.{part}"].read() for part in layer["parts"]}
        if not set(parts) <= set(_PARTS) or layer["function"] not in FUNCTIONS:
            raise ValueError(at)
        norm = None
        if "factor" in parts:
            norm = parts["factor"], parts.get("norm_bias"), float(layer["epsilon"])
        return Dense(parts["weight"], parts.get("bias"), layer["function"], norm)

    try:
        rest = {name: said[name] for name in _SAID}
        return PoolingFiles(embed=pooler("embed"), score=pooler("score"), **rest)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not as an export wrote it ({error}); export the model again with "
            "export/export_model.py"
        ) from None
