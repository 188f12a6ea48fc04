"""One stage of a deployed model: weights, KV cache, and the forward of a step.

A stage is run by one rank, or by a group of ranks that each have some heads, MLP columns and words
of it. Then each rank has an engine, and all are given the same steps in the same order with the
same activation; each gives the whole activation, or all tokens.

Not thread-safe on purpose: a node runs each device's engine on that device's one compute thread.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from stagemesh.errors import (
    CapacityExceeded,
    ProtocolError,
)
from stagemesh.inference import attention
from stagemesh.inference.attention import SegmentSpan, StepContext
from stagemesh.inference.compiled.stage_compiler import StageCompiler, check_can_compile
from stagemesh.inference.draws import draw_tokens, logit_rows
from stagemesh.inference.kv_cache import KVCache, KVLayout
from stagemesh.inference.kv_probe import probe_kv_shapes
from stagemesh.inference.stage_forward import check_attended, run_head, run_layers
from stagemesh.inference.step_checks import check_step
from stagemesh.inference.vocab_parallel import draw_over_ranks
from stagemesh.model_spec import ModelSpec
from stagemesh.models.builder import StageModel, build_stage
from stagemesh.models.draft import refusing_family_errors
from stagemesh.models.identity_check import check_identity
from stagemesh.models.tensor_group import TensorGroup
from stagemesh.steps import SampledToken, SamplingParams, Segment, Step

logger = logging.getLogger(__name__)

_WARM_UP_SESSION = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a step leaves a stage as: an activation, or tokens from the last stage."""

    activation: torch.Tensor | None = None
    """[T, D] in the run dtype; None from the last stage."""
    tokens: tuple[SampledToken, ...] = ()
    """One per segment, from the last stage."""


class StageEngine:
    """Runs steps through layers [start_layer, end_layer).

    Args:
        stage: the loaded stage.
        kv_limit_bytes: bound of the KV cache.
    """

    def __init__(self, stage: StageModel, *, kv_limit_bytes: int) -> None:
        self.stage = stage
        self.cache = KVCache(
            KVLayout(
                num_layers=stage.end_layer - stage.start_layer,
                num_kv_heads=stage.num_kv_heads,
                head_dim=stage.head_dim,
                dtype=stage.dtype,
                device=stage.device,
                shapes=stage.kv_shapes,
            ),
            limit_bytes=kv_limit_bytes,
        )
        self.compiler: StageCompiler | None = None
        """Compiles the stage, where that was asked for."""
        self._hidden_size = stage.model.config.get_text_config().hidden_size
        self._vocab_size = stage.model.config.get_text_config().vocab_size

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        *,
        start_layer: int,
        end_layer: int,
        dtype: str,
        device: torch.device,
        kv_limit_bytes: int,
        on_bytes: Callable[[int], None] | None = None,
        tensor_group: TensorGroup | None = None,
        quantize: str = "none",
        compile_folder: Path | None = None,
    ) -> "StageEngine":
        """Build, load and try out a stage.

        With a `tensor_group` all its ranks call this; each loads its own part. When one fails, it
        aborts the group, so that the others do not wait for it.

        With a `compile_folder`, where compiled code is kept, the stage is compiled while it serves;
        see `stagemesh.inference.compiled.stage_compiler`.

        Raises:
            UnsupportedModel: the family does something around its layers that stages cannot do;
                found by running it before anyone waits for an answer.
            CheckpointError: the checkpoint's files are wrong.
            ConfigError: the ranks of the group were not told the same, or what is asked for does
                not go together.
        """
        check_can_compile(compile_folder, quantize=quantize, is_shared=tensor_group is not None)
        attention.register()
        with refusing_family_errors(spec), _together(tensor_group, "loading"):
            stage = build_stage(
                spec,
                start_layer=start_layer,
                end_layer=end_layer,
                dtype=dtype,
                device=device,
                attention=attention.ATTENTION_NAME,
                probe=probe_kv_shapes,
                on_bytes=on_bytes,
                tensor_group=tensor_group,
                quantize=quantize,
                pack=compile_folder is None,
            )
            engine = cls(stage, kv_limit_bytes=kv_limit_bytes)
            if tensor_group is not None:
                told = (spec.fingerprint, start_layer, end_layer, dtype, quantize)
                engine.cache.limit_bytes = _common_limit(engine.cache, tensor_group, told)
            engine.warm_up()
            if compile_folder is not None:
                engine.start_compiling(spec, compile_folder)
        return engine

    @property
    def execution(self) -> str:
        """How it runs, for people: "eager", or what `StageCompiler.status` says."""
        return "eager" if self.compiler is None else self.compiler.status

    @property
    def device(self) -> torch.device:
        """Where the stage runs."""
        return self.cache.layout.device

    def warm_up(self) -> None:
        """Run a two-token and a one-token step and check what the family did with them.

        Raises:
            UnsupportedModel: attention did not see each layer of the stage exactly once, or a later
                stage's forward changes its input outside of the layers.
        """
        if not self.stage.is_first:
            assert self.stage.outline is not None
            check_identity(
                self.stage.model,
                outline=self.stage.outline,
                dtype=self.stage.dtype,
                device=self.device,
            )
        self._try_steps((0, 2), (2, 1))

    def start_compiling(self, spec: ModelSpec, folder: Path) -> None:
        """Take compiled code from `folder`, or have it made while the stage serves eagerly."""
        self.compiler = StageCompiler(spec, self.stage, layout=self.cache.layout, folder=folder)
        self.compiler.begin(lambda count: self._try_steps((0, count), all_logits=True))

    def close(self) -> None:
        """Free the caches and end what works for the stage."""
        self.cache.clear()
        if self.compiler is not None:
            self.compiler.close()

    def _try_steps(self, *steps: tuple[int, int], all_logits: bool = False) -> None:
        """Run steps (start, tokens) of a session that nobody waits for."""
        limit, self.cache.limit_bytes = self.cache.limit_bytes, 2**62
        try:
            for start, count in steps:
                segment = Segment(
                    session_id=_WARM_UP_SESSION,
                    start_position=start,
                    num_tokens=count,
                    sampling=SamplingParams(),
                    target_token_ids=(0,) * count if all_logits else (),
                )
                first = self.stage.is_first
                self.run(
                    Step(step_id=0, segments=(segment,), token_ids=(0,) * count if first else ()),
                    None
                    if first
                    else torch.zeros(count, self._hidden_size, dtype=self.stage.dtype),
                )
        finally:
            self.cache.limit_bytes = limit
            self.cache.release(_WARM_UP_SESSION)

    @torch.inference_mode()
    def run(self, step: Step, activation: torch.Tensor | None) -> StageOutput:
        """Run one step.

        Shapes:
            activation: [T, D], None on the first stage, which embeds `step.token_ids`.

        Raises:
            ProtocolError: the step contradicts the sessions' positions or the stage's inputs.
            CapacityExceeded: the KV cache is full.
        """
        group, what = self.stage.tensor_group, f"step {step.step_id}"
        # What is refused here all ranks of a group refuse alike.
        with _together(group, what, refusals=(CapacityExceeded, ProtocolError)):
            for session_id in step.release_session_ids:
                self.cache.release(session_id)
            if not step.segments:
                return StageOutput()
            check_step(
                step,
                activation,
                is_first=self.stage.is_first,
                hidden_size=self._hidden_size,
                vocab_size=self._vocab_size,
                dtype=self.stage.dtype,
            )
            spans = self._reserve(step.segments)
            context = StepContext(spans, first_layer=self.stage.start_layer)
        # From here on they wait for each other.
        with _together(group, what):
            output = self._forward(step, activation, context)
        check_attended(self.stage, context)
        for span in spans:
            span.session.length = span.start_position + span.num_tokens
        return output

    def _reserve(self, segments: Sequence[Segment]) -> list[SegmentSpan]:
        """Make room for all segments, or for none."""
        spans: list[SegmentSpan] = []
        started: list[int] = []
        offset = 0
        try:
            for segment in segments:
                session = self.cache.reserve(
                    segment.session_id,
                    start_position=segment.start_position,
                    num_tokens=segment.num_tokens,
                )
                if segment.start_position == 0:
                    started.append(segment.session_id)
                spans.append(
                    SegmentSpan(session, offset, segment.num_tokens, segment.start_position)
                )
                offset += segment.num_tokens
        except (CapacityExceeded, ProtocolError):
            for session_id in started:
                self.cache.release(session_id)
            raise
        return spans

    def _forward(
        self, step: Step, activation: torch.Tensor | None, context: StepContext
    ) -> StageOutput:
        if self.stage.is_first:
            inputs = {"input_ids": torch.tensor(step.token_ids, device=self.device)[None]}
        else:
            assert activation is not None
            inputs = {"inputs_embeds": activation.to(self.device)[None]}
        if not self.stage.is_last:
            # The copy off an accelerator waits for its kernels: here, on the compute thread, and
            # not where the event loop packs the activation for the wire.
            return StageOutput(activation=run_layers(self.stage, inputs, context).cpu())
        return StageOutput(tokens=self._tokens(step, inputs, context))

    def _tokens(
        self, step: Step, inputs: dict[str, torch.Tensor], context: StepContext
    ) -> tuple[SampledToken, ...]:
        """Logits for the positions that need them, and the draws from them."""
        rows = logit_rows(step.segments)
        if not rows:
            run_layers(self.stage, inputs, context)
            return tuple(SampledToken(session_id=s.session_id) for s in step.segments)
        logits = run_head(self.stage, inputs, context, rows=rows).float().cpu()
        group = self.stage.tensor_group
        if group is None:
            return draw_tokens(step.segments, logits)
        return draw_over_ranks(
            step.segments,
            logits,
            process_group=group.sums,
            first_word=group.first_word,
            vocab_size=self._vocab_size,
        )


def _together(
    group: TensorGroup | None, what: str, *, refusals: tuple[type[Exception], ...] = ()
) -> AbstractContextManager[None]:
    return nullcontext() if group is None else group.aborting(what, refusals=refusals)


def _common_limit(cache: KVCache, group: TensorGroup, told: tuple[object, ...]) -> int:
    """Bytes for the tokens that every rank has room for, so that all refuse the same steps."""
    bytes_per_token = cache.layout.bytes_per_token
    return group.meet(told, room=cache.limit_bytes // bytes_per_token) * bytes_per_token
