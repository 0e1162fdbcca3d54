"""What runs the steps of a model, or of its draft model, on one device."""

from __future__ import annotations

from dataclasses import dataclass

from predict.adapters.pool import AdapterPool
from predict.config.engine import EngineConfig
from predict.device import library
from predict.drafting import StateDrafter
from predict.engine.runner.host_chooser import HostChooser, known_tokens
from predict.engine.runner.networks import Forward, HostNetwork, HostRunner, Within
from predict.engine.step import CopyBlocks, Runner
from predict.loading.draft_config import DraftModel
from predict.loading.memory import graph_bytes, max_draft_rows
from predict.loading.platform import Platform
from predict.nn.inputs import fields_with
from predict.nn.places import fields_of
from predict.nn.spec import DecoderSpec


@dataclass(frozen=True)
class StepRunners:
    """Makes runners. pool: of adapters. draft: the draft model, or the drafter of hidden states."""

    config: EngineConfig
    platform: Platform
    spec: DecoderSpec
    pool: AdapterPool | None
    draft: DraftModel | StateDrafter | None
    drafter: StateDrafter | None

    def __call__(
        self, forward: Forward, copy_blocks: CopyBlocks, target: Runner | None = None
    ) -> Runner:
        """target: the target's runner, for a draft model."""
        fields = (
            fields_with() if target is not None else fields_of(self.spec, self.pool is not None)
        )
        config, gpu = self.config, self.platform.gpu
        columns = None if target is None or self.drafter is None else self.drafter.columns
        if gpu is None:
            network = HostNetwork(forward, self.platform.place, fields)
            return HostRunner(network, HostChooser(self.platform.backend, columns), copy_blocks)
        from predict.device.cuda import left_queued
        from predict.engine.runner.gpu import GpuRunner

        share = getattr(forward, "share", None)  # a program has none
        if config.model.mode == "static" and target is None and gpu.is_plugin:
            forward = Within(left_queued, forward)
        if config.model.batch_invariant:
            forward = Within(library.require().batch_invariant, forward)
        num_drafts = 0 if target is not None else max_draft_rows(config)
        drafts_there = target is None and self.draft is not None
        return GpuRunner(
            *(forward, copy_blocks, gpu),
            config.max_length,
            config.scheduling.batch_size,
            config.cache.block_size,
            self.spec.vocab_size,
            graph_bytes(config, self.spec),
            max_rows=config.scheduling.batch_size + num_drafts,
            # A drafter of hidden states makes a first draft of each whether it is used or not.
            max_drafts=num_drafts + config.scheduling.batch_size if drafts_there else 0,
            token_ids=None if columns is None else known_tokens(columns),
            shelf=target.shelf if isinstance(target, GpuRunner) else None,
            fields=fields,
            adapter_pages=0 if self.pool is None else self.pool.max_pages,
            # A program takes all of its inputs, and a draft model's steps have no adapters.
            always_adapted=config.model.batch_invariant or config.model.mode == "static",
            takes_all=config.model.mode == "static" and target is None,
            share=share,
        )
