"""The process in which Regatta is timed: see predict.bench.cpu_peer.sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from predict.bench.cases import UNITS, parse_cases
from predict.bench.ceilings import Limits
from predict.bench.cost import Cost, linear_bytes
from predict.bench.cpu_peer.shapes import num_parameters
from predict.bench.cpu_peer.sides import serve
from predict.bench.record import cpu_device, own_versions
from predict.bench.throughput import Plan, count_experts, measure
from predict.config.engine import EngineConfig
from predict.device import library
from predict.errors import UserError

if TYPE_CHECKING:
    from predict.llm import LLM


class Ours:
    """Answers of the process, by what is asked."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._limits: Limits | None = None

    def answer(self, question: dict[str, Any]) -> Mapping[str, Any]:
        """Loads, samples the machine's limits, counts the experts of a case, or times one."""
        if "settings" in question:
            return self._load(question["settings"], question["num_threads"])
        if "experts_of" in question:
            return self._count(question["experts_of"])
        if "limits_of" in question:
            return self._sample(question["limits_of"])
        return self._time(question["case"], question["turn"])

    def _load(self, settings: Mapping[str, Any], num_threads: int) -> Mapping[str, Any]:
        from predict.llm import LLM

        library.require().set_num_threads(num_threads)
        llm = self._llm = LLM(EngineConfig(**settings))
        if llm.decoder is None:
            raise UserError("a model of dynamic mode is timed")
        cost = Cost.of(llm.spec, llm.config.model.dtype)
        return {
            "num_parameters": num_parameters(llm.spec),
            "decode_weight_bytes": linear_bytes(llm.decoder),
            "cache_bytes_per_token": cost.cache_bytes_per_token,
            "device": cpu_device(),
            "versions": own_versions(),
        }

    def _sample(self, num_bytes: float) -> Mapping[str, Any]:
        """The bandwidth of reading so many bytes over and over, in bytes per second."""
        assert self._llm is not None
        self._limits = Limits(self._llm.config.model.dtype, num_bytes)
        self._limits.sample()
        return self._limits.samples[-1]

    def _count(self, name: str) -> Mapping[str, Any]:
        assert self._llm is not None
        plan = _plan(name, 0)
        return count_experts(self._llm, plan, plan.cases[0])

    def _time(self, name: str, turn: int) -> Mapping[str, Any]:
        assert self._llm is not None
        plan = _plan(name, turn)
        values = measure(self._llm, plan, plan.cases[0])["values"]
        return {metric: values[metric] for metric in UNITS}


def _plan(name: str, seed: int) -> Plan:
    (case,) = parse_cases([name])
    return Plan(cases=(case,), batch_size=case.num_requests, repetitions=1, seed=seed)


if __name__ == "__main__":
    serve(Ours().answer)
