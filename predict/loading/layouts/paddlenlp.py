"""PaddleNLP's post-training quantization: integer weights, and scales in JSON files beside them.

act_scales.json: "<stem>.activation_quanter": largest |x| of a linear's input; weight_scales.json:
"<stem>.weight_quanter": largest |w| of each output feature (a8w8), or of all (a8w8_fp8). A stem is
"<model>.layers.N.self_attn.q_proj"; only what follows "layers." is compared, and o_proj.layer,
down_proj.layer are PaddleNLP's names of the linears that have shift_bias and smooth_weight [K].
A linear that neither file names is stored in float; where scales may be made up
(--use_fake_parameter), all linears have some once both files are missing. Where shift is on, norms
have biases: a norm's bias is the shift of the linears that read it.

A quantization on several cards, and PaddleNLP's tools/split_weights.py, leave act_scales_N.json
and weight_scales_N.json of each rank N beside the parts of its weights. Where ranks have other rows
of a matrix, their scales lie side by side. Where they have other columns, and scales of their own,
the codes are rounded again by the largest of each row.

The tensors have Hugging Face's names and [out, in] matrices, as `quant` writes them, or as
predict.loading.paddle_checkpoint shows PaddleNLP's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from predict.config.quantization import parse_quant_type
from predict.config.schemes import SCHEMES, scheme_info
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.arrays import Shape, listed
from predict.loading.layouts._stored import Array, Stored, StoredPart
from predict.loading.layouts.online import DENSE
from predict.loading.parallel_parts import paths_of_ranks, split_of
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import LinearPlan, WeightPlan
from predict.schemes import Quantized, scheme_of
from predict.schemes._e4m3 import E4M3_MAX, VALUES, encode
from predict.system.files import FLOAT32_MAX, read_json_object

ACT_FILE, WEIGHT_FILE = "act_scales.json", "weight_scales.json"
ACT_ENDING, WEIGHT_ENDING = ".activation_quanter", ".weight_quanter"
SHIFT, SMOOTH = "shift_bias", "smooth_weight"
INT8_MAX = 127.0
FAKE_ACT, FAKE_WEIGHT = 10.0, 1.0  # largest values that are as good as any to measure speed
AGAIN = "calibrate again with quant/run_quantization.py"


class PaddleNlp(Stored):
    """Integer weights whose scales stand in JSON files."""

    ignored = (".bias",)  # of norms, see norm_biases
    mixes = False  # codes may be of shifted and smoothed inputs

    def __init__(self, config: Mapping[str, Any], where: str, *stored: Any):
        super().__init__(*stored)
        plan = self.plan
        kind = parse_quant_type(str(config["quant_type"]))
        own = config.get("moe_quant_type")
        if own or kind.expert_scheme is not None:
            raise UserError(
                f"{where}: quant_type {own or config['quant_type']} with codes of experts in "
                "PaddleNLP's own order is not supported; use the unquantized checkpoint and "
                "--quant_type"
            )
        self.quantized = kind.scheme
        info = scheme_info(self.quantized)
        if not info.has_static_scales:
            allowed = ", ".join(row.name for row in SCHEMES.values() if row.has_static_scales)
            raise UserError(
                f"{where}: quant_type {self.quantized} with {ACT_FILE} is not supported "
                f"(allowed: {allowed})"
            )
        self.floats = info.codes == "e4m3"
        directory = self.checkpoint.directory
        self.fake = self.settings.fake
        self.act = self._scales(directory / ACT_FILE, ACT_ENDING)
        self.weight = self._scales(directory / WEIGHT_FILE, WEIGHT_ENDING)
        if self.fake:
            stems = self.act.keys() | self.weight.keys() or {
                stem_of(prefix) for linear in plan.linears() for prefix in linear.prefixes
            }
            self.act = {**dict.fromkeys(stems, FAKE_ACT), **self.act}
            self.weight = {**dict.fromkeys(stems, FAKE_WEIGHT), **self.weight}
        self.schemes = frozenset({self.quantized})
        self.norm_biases = {
            prefix: norm.weight.removesuffix(".weight") + ".bias"
            for block in plan.blocks()
            for _, norm in block.norms()
            for slot, linear in block.linears()
            if norm is block.slots.get("norm") and slot == block.block.norm_reader
            for prefix in linear.prefixes
        }
        self._check_shifts(plan, where)

    def _check_shifts(self, plan: WeightPlan, where: str) -> None:
        """Raises UserError where a norm is shifted that others read than linears with codes."""
        known = self.norm_biases.values()
        biases = [
            n.weight.removesuffix(".weight") + ".bias" for n in plan.norms() if n.bias is None
        ]
        others = [b for b in biases if b in self.checkpoint.tensors and b not in known]
        if others:
            raise UserError(
                f"{where}: {listed(others)} would shift what routers, or latents, are made of, "
                "which is not supported; calibrate again without shift"
            )

    def _scales(self, path: Path, ending: str) -> dict[str, Any]:
        if not path.exists() and (paths := paths_of_ranks(path)):
            return self._joined([read_scales(each, ending) for each in paths], paths, ending)
        return {} if self.fake and not path.exists() else read_scales(path, ending)

    def _joined(
        self, ranks: Sequence[dict[str, Any]], paths: Sequence[Path], ending: str
    ) -> dict[str, Any]:
        """The scales of all ranks. Those of activations are the largest, of weights OfRanks."""
        for path, of_rank in zip(paths, ranks, strict=True):
            if other := sorted(of_rank.keys() ^ ranks[0].keys()):
                raise UserError(
                    f"{path} and {paths[0].name} do not hold the scales of the same linears; only "
                    f"one has {listed(other)}; complete the copy, or {AGAIN}"
                )
        if ending == ACT_ENDING:
            return {
                stem: np.max([np.asarray(each[stem], np.float32) for each in ranks], axis=0)
                for stem in ranks[0]
            }
        reader = ConfigReader.from_dir(self.checkpoint.directory)
        found: dict[str, Any] = {}
        for stem in ranks[0]:
            parts = [np.asarray(each[stem], np.float32).reshape(-1) for each in ranks]
            split = split_of(f"{stem}.weight", (1, 1), len(ranks), reader)
            found[stem] = OfRanks(parts, split is not None and split.is_column)
        return found

    def part_scheme(self, part: StoredPart) -> str:
        stem = stem_of(part.prefix)
        act, weight = stem in self.act, stem in self.weight
        if act != weight:
            there, lacking = (ACT_FILE, WEIGHT_FILE) if act else (WEIGHT_FILE, ACT_FILE)
            raise UserError(
                f"{self.checkpoint.directory}: {there} has a scale for {part.prefix}, and "
                f"{lacking} has none; {AGAIN}"
            )
        return self.quantized if act else DENSE

    def part_group_size(self, part: StoredPart) -> int:
        return -1

    def part_expected(self, part: StoredPart) -> Mapping[str, Shape]:
        names: dict[str, Shape] = {part["weight"]: (part.out_features, part.in_features)}
        for ending in (SHIFT, SMOOTH):
            if part[ending] in self.checkpoint.tensors:
                names[part[ending]] = (part.in_features,)
        return names

    def read_part(self, part: StoredPart) -> Quantized:
        stem, fp8 = stem_of(part.prefix), self.floats
        of_weight, by_rank = self.weight[stem], None
        if isinstance(of_weight, OfRanks):
            of_weight, by_rank = of_weight.joined(part.out_features)
        largest = np.asarray(of_weight, np.float32).reshape(-1)
        if len(largest) not in (1, part.out_features):
            raise UserError(
                f"{self.checkpoint.directory / WEIGHT_FILE}: {part.prefix} has {len(largest)} "
                f"scales for {part.out_features} output features; {AGAIN}"
            )
        act = np.asarray(self.act[stem], np.float32).reshape(-1)
        if len(act) != 1:
            raise UserError(
                f"{self.checkpoint.directory / ACT_FILE}: {part.prefix} has {len(act)} scales; it "
                f"must have one; {AGAIN}"
            )
        limit = np.float32(E4M3_MAX if fp8 else INT8_MAX)
        codes = self._codes(part, fp8)
        if codes is None:
            floats = to_float32(self.checkpoint.read(part["weight"]))
            weight = scheme_of(self.quantized).quantize(floats, -1)
        else:
            if by_rank is not None:
                codes = self._rounded_again(part, codes, by_rank / largest, fp8)
            scale = largest / limit
            rows = part.out_features
            weight = Quantized(codes, scale if fp8 else np.broadcast_to(scale, (rows,)).copy())
        return replace(
            weight,
            act_scale=float(act[0] / limit),
            shift=self._shift(part),
            smooth=self._vector(part[SMOOTH]),
        )

    def _rounded_again(self, part: StoredPart, codes: Array, ratios: Array, fp8: bool) -> Array:
        """Codes by the largest scale. ratios: [ranks, rows] of the ranks' scales to it."""
        if part.in_features % len(ratios):
            raise UserError(
                f"{self.checkpoint.directory}: {part.prefix} has {part.in_features} inputs, which "
                f"do not divide among the {len(ratios)} ranks that {WEIGHT_FILE}'s parts are of"
            )
        values = VALUES[codes] if fp8 else codes.astype(np.float32)
        pieces = values.reshape(len(values), len(ratios), -1) * ratios.T[:, :, None]
        rounded = pieces.reshape(values.shape)
        return encode(rounded) if fp8 else np.rint(rounded).astype(np.int8)

    def bias(self, plan: LinearPlan) -> Any:
        """See Layout. What a norm's bias adds to a linear in float is added to the linear's."""
        values, shift = super().bias(plan), self._vector(self.norm_biases.get(plan.prefixes[0]))
        if shift is None or not self._in_float(plan):
            return values
        added = to_float32(self.online.read(plan).codes) @ shift
        return added if values is None else to_float32(values) + added

    def _shift(self, part: StoredPart) -> Array | None:
        own = self._vector(part[SHIFT])
        return self._vector(self.norm_biases.get(part.prefix)) if own is None else own

    def _codes(self, part: StoredPart, fp8: bool) -> Array | None:
        """Codes are stored as int8 or e4m3, or as floats of the same values (PaddleNLP's way).

        None where they are other floats, and scales may be made up.
        """
        values = self.checkpoint.read(part["weight"])
        stored = self.checkpoint.tensors[part["weight"]].dtype
        if stored == ("F8_E4M3" if fp8 else "I8"):
            return values
        floats = to_float32(values)
        codes: Array = encode(floats) if fp8 else floats.clip(-INT8_MAX, INT8_MAX).astype(np.int8)
        if not np.array_equal(VALUES[codes] if fp8 else codes, floats):
            if self.fake:
                return None
            raise UserError(
                f"{self.checkpoint.directory}: {part['weight']} holds {stored} numbers that are "
                f"no {self.quantized} codes, though {WEIGHT_FILE} has its scales; {AGAIN}"
            )
        return codes

    def _vector(self, name: str | None) -> Array | None:
        return self.scales(name) if name and name in self.checkpoint.tensors else None


class OfRanks(NamedTuple):
    """The largest |w| of a linear's rows, or of all, as each rank has found it."""

    parts: Sequence[Array]
    has_rows: bool  # whether each rank has other rows of the matrix

    def joined(self, num_rows: int) -> tuple[Array, Array | None]:
        """Those of the whole matrix; and of each rank [ranks, 1 or rows], where these differ."""
        if self.has_rows:
            each = num_rows // len(self.parts)
            rows = (np.broadcast_to(part, (max(each, len(part)),)) for part in self.parts)
            return np.concatenate([*rows]), None
        if len({len(part) for part in self.parts}) > 1:
            return np.concatenate([*self.parts]), None  # which is refused by its length
        all_ranks = np.stack([*self.parts])
        differ = bool((all_ranks != all_ranks[0]).any())
        return all_ranks.max(axis=0), all_ranks if differ else None


def stem_of(name: str) -> str:
    """What identifies a linear in the scale files: the name from its layer's number on."""
    stem = name.split("layers.", 1)[-1]
    return stem.removesuffix(".layer")


def read_scales(path: Path, ending: str) -> dict[str, Any]:
    """Scales by stem. Raises UserError where the file is missing, broken, or holds no numbers."""
    if not path.exists():
        raise UserError(
            f"{path} is missing, and config.json announces quantized activations; complete the "
            f"copy, or {AGAIN}"
        )
    scales = {}
    for name, value in read_json_object(path, constants=True).items():
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(
            type(number) in (int, float) and 0 < number <= FLOAT32_MAX for number in numbers
        ):
            raise UserError(
                f"{path}: {name[:100]} is {str(value)[:60]}; it must be above 0 and at most "
                f"{FLOAT32_MAX:g}; {AGAIN}"
            )
        scales[stem_of(name.removesuffix(ending))] = value
    return scales


def linear_tensors(prefix: str, weight: Quantized) -> dict[str, tuple[str, Array]]:
    """What a quantized matrix is stored as: name -> (safetensors dtype, array)."""
    fp8 = weight.codes.dtype == np.uint8
    made: dict[str, tuple[str, Array]] = {
        f"{prefix}.weight": ("F8_E4M3" if fp8 else "I8", weight.codes)
    }
    for ending, values in ((SHIFT, weight.shift), (SMOOTH, weight.smooth)):
        if values is not None:
            made[f"{prefix}.{ending}"] = "F32", np.asarray(values, np.float32)
    return made


def scale_entries(stem: str, weight: Quantized) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The linear's entries in act_scales.json and weight_scales.json; its activations are static.

    stem: "<model_type>.layers.N.self_attn.q_proj".
    """
    limit = E4M3_MAX if weight.codes.dtype == np.uint8 else INT8_MAX
    if weight.act_scale is None:
        raise ValueError(f"{stem} has no static activation scale")
    scales = (np.asarray(weight.scale, np.float64) * limit).reshape(-1).tolist()
    return {stem + ACT_ENDING: weight.act_scale * limit}, {stem + WEIGHT_ENDING: scales}
