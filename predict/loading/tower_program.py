"""A tower as a saved program beside the text model's: written, checked, and run.

It makes the rows of a whole pass. What the host makes of pictures (patches, places, borders of
windows) are its inputs; all of their sizes vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device.cuda import left_queued
from predict.errors import UserError
from predict.loading.manifest import EXPORT, Manifest
from predict.loading.parameter_file import check_parameters
from predict.loading.platform import is_compiled
from predict.loading.program import (
    PROGRAM_ENDINGS,
    input_specs_of,
    load_program,
    trace,
    values_dtype,
)
from predict.loading.program_blocks import called_blocks
from predict.loading.program_check import TensorType, read_program
from predict.loading.safetensors_reader import read_header
from predict.loading.safetensors_writer import write
from predict.loading.vision import WIDTH, patch_width
from predict.nn.blocks import CachingBlock
from predict.nn.inputs import FIELDS, LayerCache, StepInputs, fields_with, input_specs
from predict.nn.tower import (
    KeptPositions,
    PassInputs,
    Tower,
    head_dim_of,
    parts_of,
    passing,
    scratch_of,
)
from predict.nn.vision import VisionSpec

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.device.devices import Device
    from predict.nn.inputs import Field

# Of the spans of a pass, what attention reads.
SPANS = ("positions", "slot_mapping", "cu_seqlens_q", "context_lens", "block_tables", "max_lens")
WAYS = ("whole", "windows")  # of layers that see whole pictures, and of the others


def stem_of(prefix: str) -> str:
    """The stem of the tower's files, beside a text program of stem `prefix`."""
    return f"{prefix}_tower"


def _own_inputs(spec: VisionSpec, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of the tensors of PassInputs that a tower's program takes, by name."""
    made: dict[str, tuple[str, tuple[int, ...]]] = {"patches": (dtype, (-1, patch_width(spec)))}
    if spec.learned is not None:
        made["learned"] = (dtype, (-1, spec.hidden_size))
    if spec.class_token is not None:
        made |= {"tokens": ("int32", (-1,)), "own": ("int32", (-1,))}
    if _turns(spec):
        made["rope"] = ("float32", (-1, head_dim_of(spec)))
    return made | {"back": ("int32", (-1,))}


def _turns(spec: VisionSpec) -> bool:
    """Whether attention has rotary positions."""
    kinds = {block.positions.kind for block in spec.blocks() if isinstance(block, CachingBlock)}
    return "rotary" in kinds


def _ways(spec: VisionSpec) -> list[str]:
    """Which of WAYS a tower's layers have."""
    sees_all = {each for _, each in parts_of(spec, len(spec.layers))}
    return [way for way, wanted in zip(WAYS, (True, False), strict=True) if wanted in sees_all]


def _span_fields(spec: VisionSpec, compiled: bool) -> tuple[Field, ...]:
    """The fields of a pass's spans. Plain operators read no positions that turn nothing."""
    wanted = [*SPANS, "prefix_lens"][not (compiled or _turns(spec)) :]
    return tuple(field for field in FIELDS if field.name in wanted)


def _spans(spec: VisionSpec, compiled: bool) -> list[Field]:
    """The same of each way, as a program names them."""
    fields = _span_fields(spec, compiled)
    return [replace(field, name=f"{way}_{field.name}") for way in _ways(spec) for field in fields]


def _held(spec: VisionSpec, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Keys and values of a pass."""
    return {each.name: (each.dtype, each.shape) for each in scratch_of(spec, None, dtype)}


def inputs_of(spec: VisionSpec, dtype: str, compiled: bool) -> dict[str, TensorType]:
    """What a tower's program takes, in order. dtype: of the operators' values."""
    own = {name: TensorType(*kind) for name, kind in _own_inputs(spec, dtype).items()}
    spans = {
        field.name: TensorType(
            field.dtype, tuple(size if isinstance(size, int) else -1 for size in field.shape)
        )
        for field in _spans(spec, compiled)
    }
    return own | spans | {name: TensorType(*kind) for name, kind in _held(spec, dtype).items()}


def _listed(spec: VisionSpec, compiled: bool, given: PassInputs, cache: LayerCache) -> list[Tensor]:
    """The tensors of `inputs_of`."""
    own = [getattr(given, name) for name in _own_inputs(spec, "")]
    ways = [getattr(given, way) for way in _ways(spec)]
    fields = _span_fields(spec, compiled)
    return [*own, *(getattr(way, field.name) for way in ways for field in fields), *cache]


def _given(spec: VisionSpec, compiled: bool, inputs: Sequence[Tensor]) -> PassInputs:
    """PassInputs of the tensors of `inputs_of`, but for the cache's."""
    left, none = iter(inputs), StepInputs(*(None,) * len(fields_with()))
    own = {name: next(left) for name in _own_inputs(spec, "")}
    fields = _span_fields(spec, compiled)
    ways = {
        way: none._replace(**{field.name: next(left) for field in fields}) for way in _ways(spec)
    }
    return PassInputs(**{"rope": None, **dict.fromkeys(WAYS), **own, **ways})


def save_tower(backend: ModuleType, tower: Tower, dtype: str, folder: Path, stem: str) -> None:
    """Traces a tower and writes its program, and its positions where it has learned ones."""
    spec, values, compiled = tower.spec, values_dtype(backend, dtype), is_compiled(backend)

    def forward(traced: Tower, inputs: list[Tensor], held: list[Tensor]) -> list[Tensor]:
        """held: keys and values."""
        rows: list[Tensor] = []
        # A layer at a time, so that each reads what the one before has left of them.
        given = _given(spec, compiled, inputs)
        for _ in passing(backend, traced, given, tuple(held), rows, max_layers=1):
            pass
        return rows

    own = input_specs_of(_own_inputs(spec, values))
    given = [[*own, *input_specs(_spans(spec, compiled))], input_specs_of(_held(spec, values))]
    trace(replace(tower, learned=None), forward, given, folder / stem)
    if tower.learned is not None:
        stored = np.ascontiguousarray(tower.learned, np.float32)
        write(folder / f"{stem}.safetensors", {"learned": ("F32", stored)})


def check_tower(manifest: Manifest, spec: VisionSpec, folder: Path, prefix: str) -> None:
    """Raises UserError where a tower's program is not on the list, or not config.json's."""
    stem = stem_of(prefix)
    if manifest.tower != stem:
        raise UserError(
            f"{folder}: the tower's program is {manifest.tower} in manifest.json, and beside "
            f"{prefix} it is {stem}; {EXPORT}"
        )
    endings = (*PROGRAM_ENDINGS, *(("safetensors",) if spec.learned is not None else ()))
    paths = [folder / f"{stem}.{ending}" for ending in endings]
    lacking = [path.name for path in paths if path.name not in manifest.files or not path.exists()]
    if lacking:
        raise UserError(f"the export in {folder} has no {' and no '.join(lacking)}; {EXPORT}")
    compiled = manifest.library_abi is not None
    read = read_program(paths[0], compiled, pictures=True)
    dtype = manifest.dtype if compiled else "float32"
    expected = inputs_of(spec, dtype, compiled)
    rows = TensorType(dtype, (-1, spec.out_size))
    found = called_blocks(read.calls, [each.widened(WIDTH) for each in spec.blocks()])
    problems = [*found.misfits]
    if [*read.inputs.items()] != [*expected.items()]:
        got, wanted = (
            next((f"{n} {k}" for n, k in some.items() if other.get(n) != k), "others, or in order")
            for some, other in ((read.inputs, expected), (expected, read.inputs))
        )
        problems.append(f"it takes {got}, and config.json makes it {wanted}")
    if read.outputs != [rows] * len(spec.mergers):
        problems.append(f"it gives {len(read.outputs)} tensors, not {len(spec.mergers)} of {rows}")
    if others := found.schemes - {"dense"}:
        problems.append(f"its weights are {', '.join(others)}, and a tower's are dense")
    if problems:
        raise UserError(f"{paths[0]}: {'; '.join(dict.fromkeys(problems))}; {EXPORT}")
    check_parameters(paths[1], read.parameters)


@dataclass(frozen=True)
class TowerProgram:
    """An exported tower. See predict.nn.tower.Encoder."""

    spec: VisionSpec
    program: Any  # load_program's
    learned: npt.NDArray[np.float32] | None
    context: Callable[[], AbstractContextManager[None]] = nullcontext  # of each run
    positions: KeptPositions = field(default_factory=KeptPositions)

    @property
    def width(self) -> int:
        """See Encoder."""
        return patch_width(self.spec)

    def run(
        self,
        ops: ModuleType,
        given: PassInputs,
        cache: LayerCache,
        rows: list[Tensor],
        max_layers: int | None,
    ) -> Iterator[None]:
        """See Encoder: it stops ahead of the layers, which then run in one call."""
        yield
        with self.context():
            rows += self.program.run(_listed(self.spec, is_compiled(ops), given, cache))


def load_tower(folder: Path, stem: str, spec: VisionSpec, device: Device) -> TowerProgram:
    """The tower of an export that `check_tower` has passed. Raises UserError."""
    learned = None
    if spec.learned is not None:
        path, shape = folder / f"{stem}.safetensors", (spec.learned.side,) * 2
        stored = read_header(path).get("learned")
        if stored is None or tuple(stored.shape) != (*shape, spec.hidden_size):
            raise UserError(f"{path} holds no positions learned {shape}; {EXPORT}")
        learned = np.asarray(stored.read(), np.float32)
    context = left_queued if device.is_gpu and device.is_plugin else nullcontext
    return TowerProgram(spec, load_program(folder, stem, device), learned, context)
