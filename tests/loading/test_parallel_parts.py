"""Parts of several ranks: families' tensors split as PaddleNLP does, and merged again."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from tests.support.golden import GOLDEN
from tests.support.paddle_parts import ACTIONS, in_paddles_layout, write_parts
from tests.support.stored_formats import change_params, paddle_file

OLDER = "chatglm_v2.encoder.layers.0.self_attention.query.weight"


@pytest.mark.parametrize("family", ACTIONS)
def test_parts_of_each_family_are_merged_as_they_were_split(tmp_path: Path, family: str) -> None:
    wanted = write_parts(tmp_path / "parts", family, 2)
    checkpoint = Checkpoint(tmp_path / "parts")
    assert checkpoint.stored.keys() == wanted.keys()
    for name, values in wanted.items():
        assert checkpoint.stored[name].shape == values.shape, name
        np.testing.assert_array_equal(checkpoint.stored[name].read(), values, err_msg=name)
    source = Checkpoint(GOLDEN / family)
    names = source.tensors.keys() - {"lm_head.weight"}
    renamed = "bloom_7b" in family  # its files leave the base of the names out
    for name in names:
        known = f"transformer.{name}" if renamed else name
        np.testing.assert_array_equal(checkpoint.read(known), source.read(name))


def test_a_head_that_is_the_table_of_tokens_may_be_left_out(tmp_path: Path) -> None:
    tensors = in_paddles_layout("chatglm_6b")
    del tensors["lm_head.decoder_weight"]
    shutil.copy(GOLDEN / "chatglm_6b" / "config.json", tmp_path)
    (tmp_path / "model_state.pdparams").write_bytes(paddle_file(tensors))
    checkpoint = Checkpoint(tmp_path)
    table = checkpoint.read("transformer.word_embeddings.weight")
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), table)


def test_a_table_of_tokens_without_dimensions_is_of_another_shape(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", "chatglm_6b", 2)
    head = {"lm_head.decoder_weight": np.zeros((), np.float16)}
    for path in (tmp_path / "parts").glob("*.pdparams"):
        change_params(path, lambda values: values.update(head))
    with pytest.raises(UserError, match=r"lm_head.weight \[\] instead of \[211, 48\]"):
        Checkpoint(tmp_path / "parts").check({"lm_head.weight": (211, 48)}, ("transformer",))


def test_parts_of_the_older_chatglm2_are_refused_by_name(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", "chatglm_2_6b", 2)
    for path in (tmp_path / "parts").glob("*.pdparams"):
        change_params(path, lambda values: values.update({OLDER: np.zeros((4, 4))}))
    with pytest.raises(UserError, match=r"query.weight are of a version of ChatGLM2"):
        Checkpoint(tmp_path / "parts")
