"""sentence-transformers' files and heads: what is wrong in them is refused, naming file and key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict.errors import UserError
from predict.loading.model import read_spec
from predict.loading.pooling import PoolingFiles, read_pooling, save_pooling
from predict.loading.safetensors_reader import read_header
from predict.loading.safetensors_writer import write
from tests.support.vectors import CASES, FOLDER

POOL, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
Change = Callable[[Any], Any]


def read(folder: Path) -> PoolingFiles:
    return read_pooling(folder, read_spec(folder)[0])


def module(kind: str) -> Change:
    """Puts a module of this kind behind the others."""
    return lambda listed: [*listed, {"idx": 9, "path": "", "type": f"a.models.{kind}"}]


def entry(number: int, key: str, value: Any) -> Change:
    return lambda listed: [{**e, key: value} if i == number else e for i, e in enumerate(listed)]


def key(name: str, value: Any) -> Change:
    return lambda values: {**values, name: value}


WRONG: dict[str, tuple[str, Change, str]] = {
    "no list": ("modules.json", lambda _: {}, "modules.json is an object"),
    "an empty list": ("modules.json", lambda _: [], "allowed: a list of 1 to 16"),
    "many": ("modules.json", lambda listed: listed * 9, "allowed: a list of 1 to 16"),
    "an entry of no type": ("modules.json", lambda _: [{}], "entry 0 has no type"),
    "another module": ("modules.json", module("LSTM"), "module 4 is 'a.models.LSTM'"),
    "a second pooling": ("modules.json", module("Pooling"), "module 4 is 'a.models.Pooling'"),
    "a dense layer at the end": ("modules.json", module("Dense"), "'a.models.Dense'"),
    "no network first": ("modules.json", lambda listed: listed[1:], "module 0 is"),
    "a path outside": ("modules.json", entry(1, "path", "../1_Pooling"), "path is '../1_Pooling'"),
    "an absolute path": ("modules.json", entry(1, "path", "/etc"), "path is '/etc'"),
    "a path of no text": ("modules.json", entry(1, "path", 5), "path is 5"),
    "a network elsewhere": ("modules.json", entry(0, "path", "0_Transformer"), "'0_Transformer'"),
    "no pooling": (POOL, key("pooling_mode_mean_tokens", False), "no pooling_mode"),
    "another pooling": (POOL, key("pooling_mode_attention", True), "pooling_mode_attention"),
    "a pooling of no switch": (POOL, key("pooling_mode_cls_token", 1), "pooling_mode_cls_token is"),
    "another name": (POOL, key("pooling_mode", "first"), "pooling_mode is 'first'"),
    "a prompt that may count": (POOL, key("include_prompt", "no"), "include_prompt is 'no'"),
    "another activation": (DENSE, key("activation_function", "torch.nn.Mish"), "torch.nn.Mish"),
    "another width": (DENSE, key("out_features", 5), r"linear.weight has the shape \[24, 32\]"),
    "a bias of no switch": (DENSE, key("bias", "no"), "bias is 'no'"),
    "a pooling of no text": (POOL, key("pooling_mode", [["mean"]]), "pooling_mode is"),
    "a default of no text": (
        "config_sentence_transformers.json",
        key("default_prompt_name", ["query"]),
        "default_prompt_name is",
    ),
    "no width": (DENSE, key("in_features", None), "in_features is None"),
    "half a value": (DENSE, key("in_features", 32.7), r"in_features is 32.7 \(allowed: 32,"),
    "a text as width": (DENSE, key("in_features", "32"), "in_features is '32'"),
    "a fraction of rows": (DENSE, key("out_features", 24.0), "out_features is 24.0"),
    "another network's pooling": (
        *(POOL, key("word_embedding_dimension", 768)),
        r"word_embedding_dimension is 768 \(allowed: 32,",
    ),
    "a text as dimension": (POOL, key("embedding_dimension", "32"), "embedding_dimension is '32'"),
    "another similarity": (
        "config_sentence_transformers.json",
        key("similarity_fn_name", "jaccard"),
        "similarity_fn_name is 'jaccard'",
    ),
    "a similarity of no text": (
        "config_sentence_transformers.json",
        key("similarity_fn_name", ["dot"]),
        "similarity_fn_name is",
    ),
    "prompts of no texts": (
        "config_sentence_transformers.json",
        key("prompts", {"query": 5}),
        "allowed: texts by name",
    ),
    "an unknown default": (
        "config_sentence_transformers.json",
        key("default_prompt_name", "title"),
        "default_prompt_name is 'title'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    file, change, said = WRONG[name]
    folder = shutil.copytree(FOLDER / "embedding_gemma", tmp_path / "model")
    path = folder / file
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=said) as error:
        read(folder)
    assert str(path.parent) in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"max_seq_length": 0}, "max_seq_length is 0"), ({"do_lower_case": True}, "do_lower_case")],
)
def test_lengths_that_cannot_be_are_refused(values: Any, said: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "bert", tmp_path / "model")
    (folder / "sentence_bert_config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=said):
        read(folder)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "xlm-roberta", "xlnet"])
def test_a_length_is_read_from_the_file_of_each_class(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "bert", tmp_path / "model")
    (folder / f"sentence_{name}_config.json").write_text(json.dumps({"max_seq_length": 77}))
    assert read(folder).max_length == 77


def test_a_head_that_is_missing_or_unknown_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "bert", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="its head is missing"):
        read(folder)
    other = shutil.copytree(FOLDER / "bert_reranker", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.Softmax"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="activation_fn is"):
        read(other)


@pytest.mark.parametrize("num_joined", [1, 2])
def test_a_dense_layer_of_another_width_than_the_pooled_vector_is_refused(
    num_joined: int, tmp_path: Path
) -> None:
    folder = shutil.copytree(FOLDER / "embedding_gemma", tmp_path / "model")
    width = 16 if num_joined == 1 else 32
    write(
        folder / "2_Dense" / "model.safetensors",
        {"linear.weight": ("F32", np.ones((8, width), np.float32))},
    )
    own = {"in_features": width, "out_features": 8, "bias": False}
    config = json.loads((folder / DENSE).read_text())
    (folder / DENSE).write_text(json.dumps({**config, **own}))
    pooling = json.loads((folder / POOL).read_text())
    joined = {**pooling, "pooling_mode_cls_token": num_joined == 2}
    (folder / POOL).write_text(json.dumps(joined))
    with pytest.raises(UserError, match=f"in_features is {width} .allowed: {32 * num_joined},"):
        read(folder)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("classifier_pooling", "first", "'classifier_pooling' is 'first' .allowed: cls, mean"),
        ("architectures", {"a": 1}, "'architectures' is"),
        ("classifier_from_token", ["Yes"], r"'classifier_from_token' is .* .allowed: ..no., .yes"),
        ("classifier_from_token", ["no", "yes"], "'is_original_qwen3_reranker' is None"),
        ("is_original_qwen3_reranker", True, "'classifier_from_token' is None"),
    ],
)
def test_a_config_that_misnames_its_head_is_refused(
    name: str, value: Any, said: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(FOLDER / "modernbert_reranker", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(UserError, match=said):
        read(folder)


@pytest.mark.parametrize("shape", [(), (0, 32)])
def test_a_head_of_no_label_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = changed_head("bert_reranker", "classifier.weight", np.ones(shape), tmp_path)
    with pytest.raises(UserError, match="no row for a label"):
        read(folder)


def test_a_heads_norm_has_its_bias(tmp_path: Path) -> None:
    given = np.linspace(-1, 1, 32)
    found = read(changed_head("modernbert_reranker", "head.norm.bias", given, tmp_path))
    assert found.score is not None
    norm = found.score.layers[0].norm
    assert norm is not None
    np.testing.assert_array_equal(norm[1], given.astype(np.float32))


def changed_head(case: str, name: str, value: Any, tmp_path: Path) -> Path:
    """A copy of a model with another tensor of its head."""
    folder = shutil.copytree(FOLDER / case, tmp_path / "model")
    path = folder / "model.safetensors"
    held = {key: (stored.dtype, stored.read()) for key, stored in read_header(path).items()}
    write(path, {**held, name: ("F32", np.asarray(value, np.float32))})
    return folder


@pytest.mark.parametrize("case", CASES)
def test_what_an_export_keeps_is_what_was_read(case: str, tmp_path: Path) -> None:
    found = read(FOLDER / case)
    save_pooling(found, tmp_path)
    kept = read_pooling(tmp_path, read_spec(FOLDER / case)[0])
    assert kept.prompts == found.prompts
    assert kept.num_labels == found.num_labels
    assert kept.similarity == found.similarity
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    for ours, theirs in ((kept.embed, found.embed), (kept.score, found.score)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.poolings == theirs.poolings
            np.testing.assert_array_equal(ours.finished(x), theirs.finished(x))
