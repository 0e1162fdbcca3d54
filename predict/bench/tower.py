"""Speed of a vision tower alone: `python -m predict.bench.tower --help`.

Passes over pictures of made-up pixels, on real or random weights (--load_format dummy). Nothing of
the text model is loaded. A pass begins with resized pictures in memory, and ends with their rows in
the table on the device. "queued": the host's part, on a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

import numpy as np

from predict.bench.ceilings import Limits, measure_gpu_ceilings
from predict.bench.outputs import Outputs, output_flags
from predict.bench.record import (
    RecordRow,
    command_line,
    cpu_device,
    gpu_device,
    own_versions,
    record,
    repeated_row,
    suite,
)
from predict.cli.command import command
from predict.cli.flags import FLAGS as PREDICTOR_FLAGS
from predict.cli.flags import Flag, FlagValues, parse_flags
from predict.config.engine import EngineConfig
from predict.engine.runner.towers import encoder_of
from predict.errors import UserError
from predict.images.placed import Picture, resized_picture
from predict.loading.model import open_weights, read_spec
from predict.loading.platform import Platform, platform_of
from predict.loading.vision import open_tower, pixels_of
from predict.nn.blocks import HeadSlot, LinearSlot
from predict.nn.tower import Tower
from predict.nn.vision import VisionSpec, windows_of
from predict.system.console import show
from predict.system.signals import Signals

PROG = "python -m predict.bench.tower"
GROUP = "Tower"
TAKEN = ("model_name_or_path", "device", "dtype", "load_format", "inference_model", "seed")
# fmt: off
OWN_FLAGS = (
    Flag(GROUP, "cases", "strs", ("1x1008x1008", "8x1008x1008"),
         "Passes COUNTxWIDTHxHEIGHT to measure: so many pictures of so many pixels."),
    Flag(GROUP, "repetitions", "int", 10, "Timed passes of each case."),
    *output_flags(GROUP),
)
# fmt: on
FLAGS = (*OWN_FLAGS, *(flag for flag in PREDICTOR_FLAGS if flag.name in TAKEN))
UNITS = {"pass_ms": "ms", "queued_ms": "ms"}
METHOD = (
    "Passes over pictures of made-up pixels, the device waited for behind each. Share: operations "
    "of the products and of attention, over the time and the arithmetic that was measured beside."
)


@dataclass(frozen=True)
class Case:
    """Pictures of one pass."""

    count: int
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.count}x{self.width}x{self.height}"


def parse_case(name: str) -> Case:
    """Raises UserError for what is none."""
    sizes = name.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(f"--cases has {name!r} (allowed: COUNTxWIDTHxHEIGHT, as 8x1008x1008)")
    return Case(*map(int, sizes))


def pass_flops(spec: VisionSpec, grid: tuple[int, int]) -> float:
    """Operations of one picture's pass: products, and attention within windows or pictures."""
    patches, cells = grid[0] * grid[1], spec.cells(grid)
    linears = sum(
        slot.out_features * slot.in_features
        for block in spec.blocks()
        for slot in block.slots(spec.hidden_size)
        if isinstance(slot, (LinearSlot, HeadSlot))
    )
    flops = 2.0 * patches * (linears + spec.hidden_size * spec.patch_values)
    for merger in spec.mergers:
        inner = spec.cell_values
        for product in merger.products:
            flops += 2.0 * cells[0] * cells[1] * inner * product.out_features
            inner = product.out_features
    _, sizes = windows_of(*cells, spec.window)
    in_windows = float(np.sum((sizes * spec.merge**2) ** 2))
    for index in range(len(spec.layers)):
        sees_all = not spec.window or index in spec.whole_layers
        flops += 4.0 * spec.hidden_size * (patches**2 if sees_all else in_windows)
    return flops


def pictures_of(case: Case, spec: VisionSpec, directory: str, seed: int) -> list[Picture]:
    """Made-up pictures, resized as the model's folder says."""
    pixels, rng = pixels_of(spec, directory, {}), np.random.default_rng(seed)
    height, width = pixels.size(case.height, case.width)
    values = rng.integers(0, 256, (case.count, height, width, 3), np.uint8)
    return [resized_picture(bytes(32), each, pixels) for each in values]


def passes(
    platform: Platform, tower: Tower, pictures: Sequence[Picture], dtype: str
) -> Iterator[tuple[float, float]]:
    """Seconds until a pass is queued, and until it has ended; the first passes warm up."""
    import paddle

    count = sum(each.num_rows for each in pictures)
    levels = len(tower.mergers)
    table = paddle.zeros([count * levels, tower.spec.out_size], dtype)
    encode = encoder_of(tower, table, dtype, platform)
    borders = np.cumsum([each.num_rows for each in pictures])[:-1]
    rows = np.split(np.arange(count, dtype=np.int32), borders)
    while True:
        start = time.perf_counter()
        for _ in encode(pictures, rows):
            pass
        queued = time.perf_counter() - start
        if platform.gpu is not None:
            paddle.device.synchronize(platform.place)
        yield queued, time.perf_counter() - start


def measure(
    config: EngineConfig, cases: Sequence[Case], repetitions: int
) -> tuple[Platform, list[RecordRow]]:
    """The rows of all cases. Raises UserError for a model without a tower."""
    model = config.model
    platform = platform_of(model.device, model.inference_model)
    spec, reader = read_spec(model.model_name_or_path, model.model_type)
    if spec.vision is None:
        raise UserError(f"{model.model_name_or_path} has no tower; name a model with eyes")
    platform.make_current()
    tower = open_tower(open_weights(config, spec, reader, platform), spec.vision).read()
    ceilings = {}
    if platform.gpu is not None:
        ceilings = measure_gpu_ceilings(platform.gpu, model.dtype)
    rows = []
    for case in cases:
        pictures = pictures_of(case, spec.vision, model.model_name_or_path, model.seed)
        limits = None if platform.gpu is not None else Limits(model.dtype, 1 << 28)
        timed = passes(platform, tower, pictures, model.dtype)
        for _ in range(2):
            next(timed)
        taken = []
        for _ in range(repetitions):
            taken.append(next(timed))
            if limits is not None:
                limits.sample()
        named = {"queued_ms": [1e3 * a for a, _ in taken], "pass_ms": [1e3 * b for _, b in taken]}
        row = repeated_row(str(case), named)
        flops = case.count * pass_flops(spec.vision, pictures[0].grid)
        rate = flops / (row["values"]["pass_ms"] / 1e3)
        found = limits.mean if limits is not None else ceilings
        row["values"] |= {
            "patches": sum(each.grid[0] * each.grid[1] for each in pictures),
            "tflop": flops / 1e12,
            "tflops": rate / 1e12,
        }
        if found:
            row["values"]["share_of_limit"] = rate / found["flops_per_s"]
        rows.append(row)
    return platform, rows


def table(rows: Sequence[RecordRow]) -> str:
    """The rows as lines."""
    lines = [
        f"{'pictures':>16} {'patches':>8} {'pass ms':>10} {'queued ms':>9} {'TFLOP/s':>8}  limit"
    ]
    for row in rows:
        values = row["values"]
        share = values.get("share_of_limit")
        lines.append(
            f"{row['name']:>16} {values['patches']:>8} {values['pass_ms']:>10.2f} "
            f"{values['queued_ms']:>9.2f} {values['tflops']:>8.2f}  "
            f"{'' if share is None else f'{share:.1%}'}"
        )
    return "\n".join(lines)


def engine_config(flags: FlagValues) -> EngineConfig:
    """The settings of a tower's weights."""
    given = {name: flags[name] for name in TAKEN if flags[name] is not None}
    return EngineConfig(**given)


@command()
def main(words: Sequence[str], signals: Signals) -> int:
    """The command line; returns the exit code."""
    flags = parse_flags(words, FLAGS, PROG, __doc__ or "")
    cases = [parse_case(name) for name in flags["cases"]]
    config, outputs = engine_config(flags), Outputs(flags["output_file"], flags["plot"])
    outputs.check(folders={"model_name_or_path": config.model.model_name_or_path})
    platform, rows = measure(config, cases, max(flags["repetitions"], 1))
    show(table(rows))
    device = cpu_device() if platform.gpu is None else gpu_device(platform.gpu.index)
    settings = {
        "model": config.model.model_name_or_path,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "operators": "compiled" if platform.compiled else "plain Paddle",
    }
    suites = {"tower": suite(rows, UNITS, command_line(PROG, words), METHOD)}
    outputs.write(record(device, own_versions(), settings, suites))
    return 0


if __name__ == "__main__":
    sys.exit(main())
