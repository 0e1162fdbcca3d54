"""A decoder as a saved program: written by `save_program`, run by `load_program`'s predictor."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from predict.device import library
from predict.device.devices import Device
from predict.errors import UserError
from predict.loading.platform import is_compiled
from predict.nn import decoder as network
from predict.nn.adapter_pages import low_ranks, with_pages
from predict.nn.decoder import Decoder, map_tensors
from predict.nn.inputs import cache_tensors, input_specs, of_fields
from predict.nn.places import fields_of
from predict.nn.spec import DecoderSpec
from predict.nn.tower import with_tables

if TYPE_CHECKING:
    from paddle import Tensor

TRACED_MODULES = (
    "dataclasses",
    "predict.nn.adapter_pages",
    "predict.nn.decoder",
    "predict.nn.inputs",
    "predict.nn.cache_formats",
    "predict.nn.tower",
    "predict.nn.vision",
    "predict.loading.program",
    "predict.loading.tower_program",
    "predict.ops.compiled",
    "predict.ops.composed",
    "predict.ops.plain",
    "predict.schemes",
)
PROGRAM_ENDINGS = ("json", "pdiparams")
POOL_MEBIBYTES = 64  # Paddle's own pool for a program on a native GPU; it grows


def held_tensors(
    spec: DecoderSpec,
    kv_format: str,
    block_size: int,
    dtype: str,
    pages: Mapping[str, Sequence[int]] | None,
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of what a program takes behind its fields: caches, states, then pages."""
    row = spec.cache_format(kv_format)
    caches = {
        f"{tensor.name}_{layer}": (tensor.dtype, tuple(tensor.shape))
        for layer, kept in enumerate(spec.kept)
        for tensor in row.tensors(kept, None, block_size, dtype)
    }
    states = {
        f"{state.name}_{layer}": (state.dtype, (-1, *state.shape))
        for layer, kept in enumerate(spec.states)
        for state in kept
    }
    order = sorted(caches | states, key=lambda name: int(name.rpartition("_")[2]))  # by layer
    held = {name: (caches | states)[name] for name in order}
    return held | {name: (dtype, tuple(shape)) for name, shape in (pages or {}).items()}


def held_of_layers(spec: DecoderSpec, kv_format: str) -> list[int]:
    """Tensors of `held_tensors` that each layer has: its cache's, or its states."""
    row = spec.cache_format(kv_format)
    kept = zip(spec.kept, spec.states, strict=True)
    return [len(states) or row.num_tensors(rows) for rows, states in kept]


def picture_tensors(spec: DecoderSpec, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of what a program takes of pictures, behind all else.

    The `tables_of` rows (predict.nn.tower), then the first rotary table, where tokens of pictures
    have places in several dimensions. dtype: of the operators' values.
    """
    vision = spec.vision
    if vision is None:
        return {}
    made: dict[str, tuple[str, tuple[int, ...]]] = {}
    for level in range(len(vision.mergers)):
        made[f"picture_rows_{level}"] = dtype, (-1, vision.out_size)
    if vision.axes:
        made["rotary_rows"] = "float32", (-1, spec.rotary_dims[0])
    return made


def input_specs_of(held: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[Any]:
    """InputSpecs of tensors by name; sizes below 0 vary."""
    from paddle.static import InputSpec

    return [
        InputSpec([None if size < 0 else size for size in shape], kind, name)
        for name, (kind, shape) in held.items()
    ]


def save_program(
    backend: ModuleType,
    decoder: Decoder,
    spec: DecoderSpec,
    block_size: int,
    dtype: str,
    directory: Path,
    prefix: str,
    kv_format: str = "dense",
    pages: Mapping[str, Sequence[int]] | None = None,
    taps: Sequence[str] = (),
) -> None:
    """Traces the decoder and writes `<prefix>.json` and `<prefix>.pdiparams` into `directory`.

    The program's inputs are `fields_of` the network, then the cache tensors of each layer i
    (key_cache_i, value_cache_i, ...: predict.nn.cache_formats) or its states (conv_state_i, ...:
    predict.nn.kinds), updated in place, then `pages`, then `picture_tensors`;
    output 0 is the logits, those behind it the hidden states of `taps` (predict.nn.decoder). pages:
    `page_tensors` of a network that takes adapters.
    """
    fields = fields_of(spec, pages is not None)
    counts = held_of_layers(spec, kv_format)
    held_specs = input_specs_of(held_tensors(spec, kv_format, block_size, dtype, pages))
    pictures = picture_tensors(spec, values_dtype(backend, dtype))
    num_before, vision = len(held_specs), spec.vision
    rope = None
    if "rotary_rows" in pictures:  # an input, with rows of the step behind its own
        rope, decoder = decoder.ropes[0], replace(decoder, ropes=decoder.ropes[1:])

    def forward(traced: Decoder, inputs: list[Tensor], held: list[Tensor]) -> tuple[Any, ...]:
        """held: the caches' tensors, then those of pages and of pictures."""
        held, seen = held[:num_before], held[num_before:]
        if rope is not None:
            traced = replace(traced, ropes=(seen[-1], *traced.ropes))
        if vision is not None:
            tables = seen[: len(vision.mergers)]
            given_rope = (None, 0) if rope is None else (seen[-1], rope.shape[0])
            traced = with_tables(traced, vision, tables, *given_rope)
        if pages is not None:
            traced = with_pages(traced, low_ranks(spec, held[sum(counts) :]))
        by_layer = cache_tensors(held, counts)
        given = of_fields(fields, inputs)
        found, written = network.forward(backend, traced, given, by_layer, taps=taps)
        return found.logits, [*found.hidden.values()], written

    inputs = [input_specs(fields), [*held_specs, *input_specs_of(pictures)]]
    trace(decoder, forward, inputs, directory / prefix)


def values_dtype(backend: ModuleType, dtype: str) -> str:
    """Of a backend's values: plain operators compute in float32."""
    return dtype if is_compiled(backend) else "float32"


def trace(tree: Any, forward: Callable[..., Any], inputs: list[list[Any]], path: Path) -> None:
    """Traces `forward` over a tree of weights and writes `path`.json and `path`.pdiparams.

    forward(tree, *inputs): with each tensor of the tree a parameter. inputs: lists of InputSpecs.
    """
    import paddle

    class Program(paddle.nn.Layer):
        """Holds every tensor of the tree as a buffer, so that tracing sees it as a parameter."""

        def __init__(self) -> None:
            super().__init__()
            map_tensors(tree, self._keep)

        def _keep(self, path: str, tensor: Tensor) -> None:
            # Paddle counts the names of tensors up: those of the tree are the same in each run.
            tensor.name = path
            self.register_buffer(path, tensor)

        def forward(self, inputs: list[Tensor], held: list[Tensor]) -> Any:
            """Inputs, and what is held across calls."""
            traced = map_tensors(tree, lambda path, tensor: getattr(self, path))
            return forward(traced, inputs, held)

    # Nothing below branches on a tensor's value: Paddle's rewriting of Python source is not needed.
    paddle.jit.ignore_module([importlib.import_module(name) for name in TRACED_MODULES])
    program = Program()
    program.eval()
    traced = paddle.jit.to_static(program, input_spec=inputs, full_graph=True)
    with warnings.catch_warnings():
        # reshape looks whether a tensor is on an XPU, which a traced one does not know.
        warnings.filterwarnings("ignore", message="Tensor do not have 'place' interface")
        paddle.jit.save(traced, str(path))


def load_program(directory: Path, prefix: str, device: Device) -> Any:
    """A paddle.inference predictor; `run` takes its fields, the caches and pages, in that order.

    Of files that `predict.loading.exported.check_export` has passed. device: what it was
    exported for. Raises UserError where Paddle does not take the program.
    """
    from paddle import inference

    files = [directory / f"{prefix}.{ending}" for ending in PROGRAM_ENDINGS]
    settings = inference.Config(*map(str, files))
    settings.disable_glog_info()
    if device.is_cpu:
        settings.disable_gpu()
        settings.disable_mkldnn()
    elif device.type == "gpu":
        settings.enable_use_gpu(POOL_MEBIBYTES, device.index)
    else:
        settings.enable_custom_device(device.type, device.index)
    settings.switch_ir_optim(True)
    settings.enable_new_executor()
    settings.enable_new_ir()
    try:
        with library.quiet_registration():
            return inference.create_predictor(settings)
    except (ValueError, RuntimeError) as error:  # Paddle's own, of a program that it cannot read
        lines = [line for line in str(error).splitlines() if line.strip()] or ["no further detail"]
        raise UserError(
            f"Paddle does not load {files[0]}: {lines[-1][:300]}; export the model again with "
            "export/export_model.py"
        ) from None
