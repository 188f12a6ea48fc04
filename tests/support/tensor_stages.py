"""Pipelines whose stages are groups of ranks: threads, each with the engine of one rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.inference.read_plan import plan_reads
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.tensor_group import TensorGroup
from stagemesh.placement.tensor_shares import TensorShares
from stagemesh.steps import SampledToken, SamplingParams, Segment, Step
from tests.support.ranks import run_ranks
from tests.support.stage_chain import even_sizes
from tests.support.weight_parts import keep_parts

GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What one rank saw of a generation."""

    stage: int
    tokens: list[int]
    logits: torch.Tensor | None
    """[len(prompt) + count - 1, V_r] on the last stage."""
    sampled: list[SampledToken]
    engine: StageEngine


def shares_of(
    spec: ModelSpec, num_ranks: int, *, weights: Sequence[int] | None = None
) -> TensorShares:
    return TensorShares.divide(
        num_ranks=num_ranks,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        mlp_columns=spec.config["intermediate_size"],
        vocab_size=spec.vocab_size,
        weights=weights,
    )


def load_rank(
    spec: ModelSpec,
    group: ProcessGroup,
    shares: TensorShares,
    *,
    layers: tuple[int, int] | None = None,
    dtype: str = "float32",
    kv_limit_bytes: int = 2**26,
    quantize: str = "none",
) -> StageEngine:
    start, end = layers or (0, spec.num_layers)
    return StageEngine.load(
        spec,
        start_layer=start,
        end_layer=end,
        dtype=dtype,
        device=torch.device("cpu"),
        kv_limit_bytes=kv_limit_bytes,
        tensor_group=TensorGroup(group, shares) if group.size > 1 else None,
        quantize=quantize,
    )


def keep_planned(
    spec: ModelSpec, shares: TensorShares, rank: int, layers: tuple[int, int], folder: Path
) -> ModelSpec:
    """The model, of which nothing is there but what a rank will read."""
    parts = plan_reads(
        spec,
        start_layer=layers[0],
        end_layer=layers[1],
        dtype="float32",
        quantize="none",
        shares=shares,
        rank=rank,
    )
    return keep_parts(spec, parts, folder)


def generate_on_ranks(
    model: Path | str,
    prompt: Sequence[int],
    count: int,
    *,
    degrees: Sequence[int],
    shares: Sequence[TensorShares] | None = None,
    sampling: SamplingParams = GREEDY,
    chunk: int | None = None,
    backend: str = "local",
    dtype: str = "float32",
    on_engine: Callable[[StageEngine], None] | None = None,
    parts_folder: Path | None = None,
) -> list[RankRun]:
    """Generate with stages of the given degrees, and give what each rank saw.

    The first rank of a stage sends the activation to each rank of the next one, and the last rank
    tells all others the tokens. With a `parts_folder` each rank loads from files there, which have
    the bytes that were planned for it and no others.
    """
    spec = load_model_spec(model)
    sizes = even_sizes(spec.num_layers, len(degrees))
    parts = shares or [shares_of(spec, degree) for degree in degrees]
    members = [list(range(sum(degrees[:s]), sum(degrees[: s + 1]))) for s in range(len(degrees))]

    def run(world: ProcessGroup) -> RankRun:
        groups = [world.subgroup(ranks) for ranks in members]
        stage = next(s for s, ranks in enumerate(members) if world.rank in ranks)
        group = groups[stage]
        assert group is not None
        layers = (sum(sizes[:stage]), sum(sizes[: stage + 1]))
        own = spec
        if parts_folder is not None:
            own = keep_planned(
                spec, parts[stage], group.rank, layers, parts_folder / f"{world.rank}"
            )
        engine = load_rank(own, group, parts[stage], layers=layers, dtype=dtype)
        if on_engine is not None:
            on_engine(engine)
        kept: list[torch.Tensor] = []
        engine.stage.model.register_forward_hook(
            lambda _module, _args, output: kept.append(output.logits[0].float().clone())
        )
        tokens, sampled = _generate(world, engine, members, stage, prompt, count, sampling, chunk)
        return RankRun(
            stage=stage,
            tokens=tokens,
            logits=torch.cat(kept) if kept else None,
            sampled=sampled,
            engine=engine,
        )

    return run_ranks(sum(degrees), run, backend=backend, timeout_seconds=20.0)


def whole_logits(runs: Sequence[RankRun]) -> torch.Tensor:
    """The ranks' logits side by side: [n, V]."""
    return torch.cat([run.logits for run in runs if run.logits is not None], dim=-1)


def _generate(
    world: ProcessGroup,
    engine: StageEngine,
    members: list[list[int]],
    stage: int,
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParams,
    chunk: int | None,
) -> tuple[list[int], list[SampledToken]]:
    rest, tokens, position, step_id = list(prompt), [], 0, 0
    sampled: list[SampledToken] = []
    while len(tokens) < count:
        piece = rest[: chunk or len(rest)] if rest else tokens[-1:]
        rest = rest[len(piece) :]
        step_id += 1
        segment = Segment(
            session_id=1,
            start_position=position,
            num_tokens=len(piece),
            sampling=None if rest else sampling,
            target_token_ids=tuple(piece),  # so that each position's logits are computed
        )
        step = Step(
            step_id=step_id,
            segments=(segment,),
            token_ids=() if stage else tuple(piece),
        )
        activation = world.recv_tensor(src=members[stage - 1][0]) if stage else None
        output = engine.run(step, activation)
        if output.activation is not None and world.rank == members[stage][0]:
            for peer in members[stage + 1]:
                world.send(output.activation, dst=peer)
        told = torch.zeros(1, dtype=torch.int64)
        if output.tokens:
            sampled.extend(output.tokens)
            told[0] = -1 if output.tokens[0].token_id is None else output.tokens[0].token_id
        world.broadcast(told, src=members[-1][-1])
        position += len(piece)
        if not rest:
            tokens.append(int(told))
    return tokens, sampled
