"""A compiled stage against its eager self and transformers; what is compiled, and when.

One compilation serves all tests of this file: of a tiny model, while a node serves with it.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from stagemesh.inference.compiled import cache, stage_compiler
from stagemesh.inference.compiled.code import CompiledForward
from stagemesh.inference.compiled.linear_forms import MANY
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import load_model_spec
from stagemesh.steps import Segment
from stagemesh.weight_transfer.cache_folder import compiled_code_folder
from tests.support.checkpoints import tiny_model, write_byte_tokenizer, write_model
from tests.support.cluster import start_cluster
from tests.support.stage_chain import GREEDY, StageChain, reference_logits, reference_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(cache.compiler() is None, reason=stage_compiler.NO_COMPILER),
]

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
NUM_TOKENS = 8
SECONDS = 400.0
FORMS = (1, MANY)


@dataclass(slots=True)
class Served:
    """What was seen of a node that compiled while it served."""

    model: Path
    folder: Path
    executions: list[str] = field(default_factory=list)
    phases: set[str] = field(default_factory=set)
    texts: list[list[int]] = field(default_factory=list)


def tiny() -> PreTrainedModel:
    return tiny_model("llama", num_layers=2, vocab_size=260)


async def serve(served: Served) -> None:
    async with start_cluster(served.model, num_nodes=1, compile=True) as cluster:
        async with asyncio.timeout(SECONDS):
            while not served.executions or served.executions[-1] == "compiling":
                (stage,) = next(iter(cluster.nodes.values())).daemon.servicer.stage_statuses()
                served.executions.append(stage.execution)
                served.phases.add(cluster.deployment.phase)
                served.texts.append(await cluster.generate(PROMPT, NUM_TOKENS))
                await asyncio.sleep(1.0)


@pytest.fixture(scope="module", autouse=True)
def fewer_forms() -> Iterator[None]:
    """Each takes seconds to compile; for those left out see test_filling and test_linear_forms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_compiler, "forms_for", lambda _device, _dtype: FORMS)
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, fewer_forms: None) -> Served:
    place = tmp_path_factory.mktemp("compiled")
    model = write_model(place / "model", tiny())
    write_byte_tokenizer(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place))
        result = Served(model, compiled_code_folder())
        asyncio.run(serve(result))
    return result


def load(served: Served, *, folder: Path | None = None) -> StageEngine:
    return StageEngine.load(
        load_model_spec(served.model),
        start_layer=0,
        end_layer=2,
        dtype="float32",
        device=torch.device("cpu"),
        kv_limit_bytes=2**28,
        compile_folder=folder or served.folder,
    )


def wait(engine: StageEngine) -> str:
    assert engine.compiler is not None
    deadline = time.monotonic() + SECONDS
    while not engine.compiler.is_settled and time.monotonic() < deadline:
        time.sleep(0.05)
        engine.compiler.advance()
    return engine.execution


def test_a_node_serves_while_it_compiles(served: Served) -> None:
    assert served.executions[0] == "compiling"
    assert served.executions[-1] == "compiled"
    assert len(served.executions) > 3
    assert served.phases == {"ready"}
    expected = reference_tokens(tiny(), PROMPT, NUM_TOKENS)
    assert all(text == expected for text in served.texts)


def test_the_second_start_takes_what_the_first_left(served: Served) -> None:
    files = sorted(served.folder.glob("*.pt2"))
    # Both layers are of one kind, the head is the other.
    assert len(files) == 2 * len(FORMS)
    engine = load(served)
    assert engine.execution == "compiled"
    assert sorted(served.folder.glob("*.pt2")) == files
    layers = engine.stage.model.base_model.layers
    assert all(isinstance(layer.forward, CompiledForward) for layer in layers)
    engine.close()


def test_logits_are_those_of_transformers_at_any_number_of_tokens(served: Served) -> None:
    model, chain = tiny(), StageChain(served.model, compile_folder=served.folder)
    assert chain.engines[0].execution == "compiled"
    for length in (1, 2, 4, 5, 8, 9, 17, 40):
        prompt = [(7 * i + length) % 100 for i in range(length)]
        tokens, logits = chain.generate(prompt, 3)
        expected = reference_logits(model, prompt + tokens[:-1])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_ragged_steps_of_up_to_eight_sessions_compile_nothing_anew(served: Served) -> None:
    model, chain = tiny(), StageChain(served.model, compile_folder=served.folder)
    files = sorted(served.folder.glob("*.pt2"))
    traced = dict(torch._dynamo.utils.counters["frames"])
    used: set[int] = set()
    for layer in chain.engines[0].stage.model.base_model.layers:
        layer.forward._forms = Watched(layer.forward._forms, used)
    prompts = {s: [(11 * s + 3 * i) % 100 for i in range(s)] for s in range(1, 9)}
    tokens: dict[int, list[int]] = {session: [] for session in prompts}
    for session in prompts:  # each step has one session more: a prefill beside decodes
        known = {s: prompts[s] if s == session else tokens[s][-1:] for s in range(1, session + 1)}
        starts = {s: 0 if s == session else len(prompts[s]) + len(tokens[s]) - 1 for s in known}
        segments = [segment(s, starts[s], len(ids)) for s, ids in known.items()]
        sampled = chain.run(segments, [i for ids in known.values() for i in ids])
        for token in sampled:
            tokens[token.session_id].append(token.token_id or 0)
    for session, prompt in prompts.items():
        assert tokens[session] == reference_tokens(model, prompt, len(tokens[session]))
    assert used == set(FORMS)
    assert sorted(served.folder.glob("*.pt2")) == files
    assert dict(torch._dynamo.utils.counters["frames"]) == traced


class Watched(dict[int, Any]):
    """Notes which forms run."""

    def __init__(self, forms: dict[int, Any], used: set[int]) -> None:
        super().__init__(forms)
        self._used = used

    def __getitem__(self, form: int) -> Any:
        self._used.add(form)
        return super().__getitem__(form)


def segment(session_id: int, start: int, count: int) -> Segment:
    return Segment(session_id=session_id, start_position=start, num_tokens=count, sampling=GREEDY)


def test_code_that_computes_something_else_does_not_take_over(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's code in the cache, under the right names."""
    other = tmp_path / "other"
    model = tiny_model("llama", num_layers=2, vocab_size=260, rms_norm_eps=0.5)
    write_model(other, model)
    names = {p.form: p for p in names_of(served)}
    for package in names_of(Served(other, served.folder)):
        if package.kind.layer is not None:
            (tmp_path / package.path.name).write_bytes(names[package.form].path.read_bytes())
    monkeypatch.setenv("CXX", "no-such-compiler")
    chain = StageChain(other, sizes=(1, 1), compile_folder=tmp_path)
    first, second = chain.engines
    assert first.execution.startswith("eager: compiled code differs from the family's by")
    assert second.execution.startswith("eager: there is no C++ compiler")
    tokens, _ = chain.generate(PROMPT, NUM_TOKENS)
    assert tokens == reference_tokens(model, PROMPT, NUM_TOKENS)


def names_of(served: Served) -> list[stage_compiler.Package]:
    """Layer packages of a model's first stage."""
    spec = load_model_spec(served.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        engine = StageEngine.load(
            spec,
            start_layer=0,
            end_layer=1,
            dtype="float32",
            device=torch.device("cpu"),
            kv_limit_bytes=2**28,
            compile_folder=served.folder,
        )
    assert engine.compiler is not None
    return engine.compiler.packages


def test_a_layer_that_is_not_as_its_class_makes_it_stays_eager_by_name(served: Served) -> None:
    spec = load_model_spec(served.model)
    engine = StageEngine.load(
        spec,
        start_layer=0,
        end_layer=1,
        dtype="float32",
        device=torch.device("cpu"),
        kv_limit_bytes=2**28,
    )
    engine.stage.model.base_model.layers[0].mlp.added_later = 3
    engine.start_compiling(spec, served.folder)
    assert engine.execution == "compiling"
    assert wait(engine) == (
        "eager: UnsupportedModel: the loaded layer is not as the family's class makes it"
    )
    engine.close()
