"""The worked examples of docs/extending.md do what the page says."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import build
import make_records
import paddle
from export.export_model import export_model
from predict import LLM, EngineConfig, SamplingParams, UserError
from predict.bench.cost import Cost
from predict.config import cache, schemes
from predict.device import built, library
from predict.engine import logits_processors
from predict.loading.memory import weight_bytes
from predict.nn import cache_formats as kv_formats
from predict.nn.adapter_pages import paged_slots
from predict.nn.plans import plan_weights
from predict.nn.weights import WeightNames
from predict.ops import plain
from tests.docs_examples import cache_format
from tests.docs_examples.engine import no_doubles
from tests.docs_examples.models.acme import WEIGHTS as ACME_NAMES
from tests.support import tiny
from tests.support.drafts import draft_always

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = Path(__file__).parents[1] / "docs_examples"
PROMPTS = [[3, 17, 5, 9, 11], [40, 41, 42, 43, 40, 41, 42, 43]]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
Enter = Callable[[str, str], None]


@pytest.fixture
def in_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Enter]:
    """Call it with a package and a module: the example is found as if it stood there."""
    entered: list[tuple[str, str]] = []

    def enter(package: str, module: str) -> None:
        home = importlib.import_module(f"predict.{package}")
        home.__path__.append(str(EXAMPLES / package.replace(".", "/")))
        entered.append((f"predict.{package}", module))

    yield enter
    for package, module in entered:
        sys.modules[package].__path__.pop()
        sys.modules.pop(f"{package}.{module}", None)
        vars(sys.modules[package]).pop(module, None)


@pytest.fixture
def model(tmp_path: Path) -> EngineConfig:
    directory = tiny.write(tmp_path / "model")
    return EngineConfig(
        model_name_or_path=str(directory), max_length=64, batch_size=2, inference_model=False
    )


def tokens(model: EngineConfig) -> list[tuple[int, ...]]:
    return [output.token_ids for output in LLM(model).generate(PROMPTS, GREEDY)]


def acme_name(name: str) -> str:
    """What the example's family calls a tensor of Llama's."""
    llama, acme = WeightNames(), ACME_NAMES
    pairs = [(llama.embedding, acme.embedding), (llama.final_norm, acme.final_norm)]
    pairs += [(llama.head, acme.head), ("model.layers", "acme.blocks")]
    pairs += [(llama.attention_norm, acme.attention_norm), (llama.mlp_norm, acme.mlp_norm)]
    for field in ("qkv", "out", "gate_up", "down"):
        pairs += zip(getattr(llama, field), getattr(acme, field), strict=True)
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def test_a_family_is_one_file(tmp_path: Path, model: EngineConfig, in_package: Enter) -> None:
    in_package("models", "acme")
    llama, acme = Path(model.model.model_name_or_path), tmp_path / "acme"
    acme.mkdir()
    values = json.loads((llama / "config.json").read_text())
    values |= {"model_type": "acme", "use_qkv_bias": False}
    (acme / "config.json").write_text(json.dumps(values))
    renamed = {acme_name(n): v for n, v in load_file(llama / "model.safetensors").items()}
    assert not any(name.startswith("model.") for name in renamed)
    save_file(renamed, acme / "model.safetensors")
    assert tokens(model.changed(model_name_or_path=str(acme))) == tokens(model)


@pytest.fixture
def narrow(tmp_path: Path, model: EngineConfig, in_package: Enter) -> EngineConfig:
    """The model with a bottleneck in each layer, of random weights."""
    in_package("nn.kinds", "bottleneck")
    in_package("models", "acme_narrow")
    llama, acme = Path(model.model.model_name_or_path), tmp_path / "narrow"
    acme.mkdir()
    values = json.loads((llama / "config.json").read_text())
    values |= {"model_type": "acme_narrow", "bottleneck_size": 24}
    (acme / "config.json").write_text(json.dumps(values))
    tensors, rng = load_file(llama / "model.safetensors"), np.random.default_rng(0)
    for layer in range(2):
        at = f"model.layers.{layer}.blocks.2.bottleneck."
        tensors[at + "norm.weight"] = np.ones(64, np.float32)
        for name, shape in (("down", (24, 64)), ("up", (64, 24))):
            tensors[f"{at}{name}.weight"] = 0.5 * rng.standard_normal(shape, dtype=np.float32)
    save_file(tensors, acme / "model.safetensors")
    return model.changed(model_name_or_path=str(acme))


def test_a_kind_of_block_is_one_file(
    tmp_path: Path,
    model: EngineConfig,
    narrow: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = importlib.import_module("predict.nn.kinds.bottleneck").BottleneckBlock
    monkeypatch.setattr(record, "is_fused", False)  # as long as it has no folder
    llm, llama = LLM(narrow), LLM(model)
    assert llm.decoder is not None
    weights = llm.decoder.layers[0][2]
    own, others = tokens(narrow), tokens(model)
    assert own != others
    assert tokens(narrow.changed(inference_model=True)) == own
    assert tokens(narrow.changed(quant_type="weight_only_int8")) != others
    export_model(narrow, tmp_path / "static")
    static = narrow.changed(model_name_or_path=str(tmp_path / "static"), mode="static")
    assert tokens(static) == own
    # What it does, and what counts it.
    x = np.linspace(-1, 1, 64, dtype=np.float32)[None]
    down, up = (linear.tensors[0].numpy() for linear in weights.linears().values())
    inner = x / np.sqrt(np.mean(x * x) + 1e-5) @ down.T
    wanted = x + (inner * (0.5 + 0.5 * np.vectorize(math.erf)(inner / 2**0.5))) @ up.T
    made, _ = plain.block(paddle.to_tensor(x), weights)
    np.testing.assert_allclose(made.numpy(), wanted, rtol=1e-4, atol=1e-5)
    more = 2 * 2 * 24 * 64
    assert llm.spec.num_matmul_weights - llama.spec.num_matmul_weights == more
    costs = [Cost.of(each.spec, "float32").weight_bytes for each in (llm, llama)]
    assert costs[0] - costs[1] == 4 * more
    plans = [plan_weights(each.spec, WeightNames()) for each in (llm, llama)]
    sizes = [weight_bytes(plan, lambda linear: "dense", "float32") for plan in plans]
    assert sizes[0] - sizes[1] == 4 * (more + 2 * 64)
    pages = [slot.name for slot in paged_slots(llm.spec)]
    assert pages[4:6] == ["layers_0_2_down", "layers_0_2_up"]


def test_a_kind_s_record_in_cpp_is_made_of_it(narrow: EngineConfig) -> None:
    made = make_records.headers()[ROOT / "csrc" / "blocks" / "bottleneck" / "record.h"]
    assert made == (EXAMPLES / "csrc" / "blocks" / "bottleneck" / "record.h").read_text()


def test_a_scheme_is_one_file_and_a_row(
    model: EngineConfig, in_package: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "weight_only_int6"
    in_package("schemes", name)
    nowhere = schemes.Support(cpu=False, gpu=(99, 0))
    row = schemes.SchemeInfo(name=name, codes="int6", support=nowhere)
    monkeypatch.setitem(schemes.SCHEMES, name, row)
    llm = LLM(model.changed(quant_type=name))
    assert llm.decoder is not None
    assert [linear.scheme for linear in llm.decoder.layers[0][1].linears().values()] == [name] * 2
    assert all(len(o.token_ids) == 24 for o in llm.generate(PROMPTS, GREEDY))
    with pytest.raises(UserError, match="does not run on the compiled operators"):
        LLM(model.changed(quant_type=name, inference_model=True))


def test_a_scheme_s_product_is_near_the_weight_s(in_package: Enter) -> None:
    from predict.schemes import scheme_of

    in_package("schemes", "weight_only_int6")
    scheme = scheme_of("weight_only_int6")
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((24, 48), dtype=np.float32)
    made = scheme.tensors(scheme.quantize(weight, -1), "float32", compiled=None)
    step = np.abs(weight).max(axis=1, keepdims=True) / 31
    assert (np.abs(scheme.plain(made).numpy() - weight) <= 0.5001 * step).all()
    x = paddle.to_tensor(generator.standard_normal((3, 48), dtype=np.float32))
    assert np.allclose(scheme.product(x, made), x.numpy() @ scheme.plain(made).numpy().T, atol=1e-4)


def test_a_cache_format_is_a_row(model: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_formats, "FORMATS", (*kv_formats.FORMATS, cache_format.ROW))
    monkeypatch.setitem(cache.KV_FORMATS, "affine", "int8_affine")
    affine = model.changed(cachekv_int8_type="affine")
    assert affine.kv_format == "int8_affine"
    same = [a == b for a, b in zip(tokens(affine), tokens(model), strict=True)]
    assert any(same)  # 8 bits with a minimum are near enough for a tiny model


def test_a_rule_of_sampling_is_a_field_and_a_row(
    model: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = (*logits_processors.RULES, no_doubles.no_doubles)
    monkeypatch.setattr(logits_processors, "RULES", rules)
    greedy = no_doubles.Params(
        temperature=0.0, max_new_tokens=12, ignore_eos=True, logit_bias={5: 100.0}
    )
    for backend in (False, True):
        llm = LLM(model.changed(inference_model=backend))
        for doubles, count in (((), 12), ((5,), 6)):
            given = dataclasses.replace(greedy, no_doubles=doubles)
            found = [output.token_ids for output in llm.generate(PROMPTS, given)]
            assert [ids[::2].count(5) + ids[1::2].count(5) for ids in found] == [count] * 2


def test_a_drafter_is_one_file_and_changes_no_text(model: EngineConfig, in_package: Enter) -> None:
    in_package("speculative", "bigram")
    drafts = model.changed(
        speculate_method="bigram", speculate_max_draft_token_num=4, max_length=256
    )
    long = dataclasses.replace(GREEDY, max_new_tokens=160)
    llm = LLM(drafts)
    draft_always(llm)
    found = [output.token_ids for output in llm.generate(PROMPTS, long)]
    plain = LLM(model.changed(max_length=256)).generate(PROMPTS, long)
    assert found == [output.token_ids for output in plain]
    assert llm.stats().num_accepted_draft_tokens > 0


OPERATOR_CHECK = """
import sys
import paddle
from paddle import _C_ops
from paddle.base import core

assert core.load_op_meta_info_and_register_op(sys.argv[1]) == ["regatta_relu_squared"]
for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 0.0), ("float16", 0.0)):
    x = paddle.randn([5, 37]).astype(dtype)
    (found,) = _C_ops._run_custom_op("regatta_relu_squared", x)
    plain = paddle.nn.functional.relu(x.astype("float32")).square().astype(dtype)
    difference = found.astype("float32") - plain.astype("float32")
    assert difference.abs().max() <= tolerance, dtype
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_an_operator_is_a_header_a_kernel_and_a_registration(tmp_path: Path) -> None:
    paddle = build.find_paddle()
    headers, libraries = paddle.root / "include", paddle.root / "libs"
    own, csrc = EXAMPLES / "csrc", ROOT / "csrc"
    folders = [own / "include", own / "cpu", csrc, csrc / "include", csrc / "cpu", csrc / "paddle"]
    flags = [*build.CXX_FLAGS, "-O1", *(f"-I{folder}" for folder in folders)]
    flags += [f"-isystem{headers}", f"-isystem{headers / 'third_party'}"]
    names = ("dispatch", "features_x86", "features_arm", "thread_pool", "cpu_info")
    shared = [csrc / "cpu" / f"{name}.cc" for name in names]
    sources = [own / "cpu" / "relu_squared.cc", own / "paddle" / "relu_squared.cc", *shared]
    objects = [str(tmp_path / f"{number}.o") for number in range(len(sources))]
    for source, made in zip(sources, objects, strict=True):
        subprocess.run(["g++", *flags, "-c", str(source), "-o", made], check=True)
    library = tmp_path / "librelu_squared.so"
    link = [f"-L{paddle.root / 'base'}", f"-L{libraries}", f"-Wl,-rpath-link,{libraries}"]
    link += [f"-l:{name}" for name in build.PADDLE_LIBRARIES]
    subprocess.run(["g++", *build.LINK_FLAGS, *objects, *link, "-o", str(library)], check=True)
    subprocess.run([sys.executable, "-c", OPERATOR_CHECK, str(library)], check=True)


KIND_CHECK = """
import importlib, json, sys
from pathlib import Path
examples, model, exported = sys.argv[1:]
for package in ("nn/kinds", "models"):
    home = importlib.import_module("predict." + package.replace("/", "."))
    home.__path__.append(f"{examples}/{package}")
from export.export_model import export_model
from predict import LLM, EngineConfig, SamplingParams

own = EngineConfig(model_name_or_path=model, max_length=64, batch_size=2)
greedy = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
export_model(own, Path(exported))
static = own.changed(model_name_or_path=exported, mode="static")
prompts = json.load(sys.stdin)
for config in (own, own.changed(inference_model=False), static):
    print(json.dumps([output.token_ids for output in LLM(config).generate(prompts, greedy)]))
"""


@pytest.fixture
def bottleneck_library(tmp_path: Path) -> Path:
    """The library with the folder of the example's kind: its one source beside all others."""
    source, folder = EXAMPLES / "csrc/blocks/bottleneck/kind.cc", build.BUILD_DIR / "cpu"
    build.build_cpu_library()
    text = (folder / "build.ninja").read_text()
    _, _, objects = text.partition(f"build {library.LIBRARY_NAME}: link ")
    objects = objects.partition("\n")[0]
    flags = " ".join([*build.CXX_FLAGS, *build.OWN_HEADERS, f"-I'{EXAMPLES / 'csrc'}'"])
    lines = [f"build bottleneck.o: compile {build.escaped(source)}", f"  flags = {flags}"]
    lines += [f"build bottleneck.so: link bottleneck.o {objects}", "default bottleneck.so", ""]
    build.run_ninja(folder, text + "\n".join(lines), 1, name="bottleneck.ninja")
    made = tmp_path / library.LIBRARY_NAME
    shutil.copyfile(folder / "bottleneck.so", made)
    metadata = built.read(library.LIBRARY_DIR / library.METADATA_NAME)
    metadata = dataclasses.replace(metadata, file=built.describe(made))
    made.with_suffix(".json").write_text(metadata.to_json())
    return made


@pytest.mark.slow  # it links the library
def test_a_kind_of_block_is_one_module_and_one_folder(
    tmp_path: Path, narrow: EngineConfig, bottleneck_library: Path
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", KIND_CHECK, str(EXAMPLES), str(tmp_path / "narrow"), "exported"],
        cwd=tmp_path,
        env={**os.environ, "REGATTA_LIBRARY": str(bottleneck_library), "PYTHONPATH": str(ROOT)},
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    said = [json.loads(line) for line in process.stdout.splitlines()]
    assert said == [[list(ids) for ids in tokens(narrow)]] * 3


def test_what_a_kind_of_block_adds_is_listed() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    paths = [EXAMPLES / "nn/kinds/bottleneck.py", *(EXAMPLES / "csrc/blocks").rglob("*.*")]
    for path in paths:
        home = "predict" if path.suffix == ".py" else "."
        name = (Path(home) / path.relative_to(EXAMPLES)).as_posix()
        count = len(path.read_text(encoding="utf-8").splitlines())
        assert f"\n{name:<35} | {count:>3}\n" in page


def test_a_kind_of_block_has_its_gpu_half_in_the_folder(tmp_path: Path) -> None:
    try:
        headers = build.find_cuda_toolkit().include
    except build.BuildError as error:
        pytest.skip(str(error))
    own, csrc = EXAMPLES / "csrc", ROOT / "csrc"
    folders = [csrc / "include", csrc, own, headers]
    flags = ["-std=c++17", "-Wall", "-Werror", "-fsyntax-only", "-x", "c++"]
    command = ["g++", *flags, *(f"-I{folder}" for folder in folders)]
    subprocess.run([*command, str(own / "blocks" / "bottleneck" / "cuda.cu")], check=True)
