"""Kinds of blocks are known in predict/nn/kinds alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module

import pytest

import make_records
from predict.nn import blocks
from predict.nn.blocks import Block, BlockWeights
from predict.nn.kinds import known_kinds
from tests.support.paths import ROOT

KINDS = ROOT / "predict" / "nn" / "kinds"


def classes_of_kinds() -> set[str]:
    """Names of the records and of the weights of all kinds."""
    modules = [import_module(f"predict.nn.kinds.{name}") for name in known_kinds()]
    return {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, (Block, BlockWeights))
        if value.__module__ == module.__name__
    }


def asked(text: str) -> Iterator[int]:
    """The lines that ask of what kind a block is."""
    names, kinds = classes_of_kinds(), set(known_kinds())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "isinstance",
            "issubclass",
        ):
            parts = [part for argument in node.args[1:] for part in ast.walk(argument)]
            found = {getattr(part, "id", getattr(part, "attr", "")) for part in parts} & names
        elif isinstance(node, ast.MatchClass):
            found = {getattr(node.cls, "id", getattr(node.cls, "attr", ""))} & names
        elif isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "kind":
            constants = [part for other in node.comparators for part in ast.walk(other)]
            found = {getattr(part, "value", None) for part in constants} & kinds
        else:
            continue
        if found:
            yield node.lineno


def test_nothing_outside_asks_of_what_kind_a_block_is() -> None:
    paths = [
        path for room in ("predict", "quant", "export") for path in (ROOT / room).rglob("*.py")
    ]
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        if KINDS not in path.parents
        for line in asked(path.read_text(encoding="utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(block, MlpBlock)",
        "isinstance(block, (int, kinds.experts.ExpertBlock))",
        "match block:\n case Attention(): pass",
        'block.kind == "mlp"',
        'block.kind in ("mlp", "none")',
    ],
)
def test_a_question_is_found(text: str) -> None:
    assert list(asked(text))


@pytest.mark.parametrize("name", ["AttentionBlock", "ExpertBlock", "MlpBlock", "Router"])
def test_a_family_may_import_a_record_from_where_it_was(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"blocks\.{name} is predict\.nn\.kinds\.\w+\."):
        assert getattr(blocks, name).__module__.startswith("predict.nn.kinds.")


def test_the_records_in_cpp_are_those_of_today() -> None:
    """csrc/make_records.py wrote them."""
    assert make_records.main(["--check"]) == 0
