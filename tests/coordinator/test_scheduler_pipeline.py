"""The scheduler over a simulated pipeline: what holds for any arrivals, cancels and restarts."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.generation import GenerationRequest
from coordinator.kv_budget import KVBudget
from coordinator.scheduler import Scheduler
from coordinator.scheduler_config import SchedulerConfig
from stagemesh.steps import SamplingParams, StepFailure, StepResult
from tests.coordinator.pipeline_sim import Pipeline, expected_tokens, target_score

CONTEXT = 60


def make_pipeline(
    *, num_stages: int = 2, capacity: int = 100_000, context: int = 5_000, **fields: int
) -> Pipeline:
    config = SchedulerConfig(
        num_stages=num_stages, kv_capacity_tokens=capacity, max_context_tokens=context, **fields
    )
    return Pipeline(Scheduler(config), num_stages=num_stages)


def make_request(prompt: tuple[int, ...], max_tokens: int, **fields) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        model="m",
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        **fields,
    )


def check_steps(pipeline: Pipeline) -> None:
    """Rules that every sent step keeps; order on the stages is checked by the stages themselves."""
    limit = pipeline.scheduler.config.max_step_tokens
    step_ids = [step.step_id for _, step in pipeline.sent]
    assert step_ids == sorted(set(step_ids))
    for _, step in pipeline.sent:
        assert step.segments or step.release_session_ids, "an empty step"
        assert len(step.token_ids) == step.num_tokens <= limit
        assert max(Counter(s.session_id for s in step.segments).values(), default=0) <= 1


def watch_flights(pipeline: Pipeline) -> None:
    """Check after each send that no session has two draws in flight, and the KV reservation."""
    scheduler = pipeline.scheduler
    send = scheduler.next_step

    def watched():
        step = send()
        draws = Counter(
            segment.session_id
            for flying in scheduler.in_flight_steps()
            for segment in flying.segments
            if segment.sampling is not None
        )
        assert max(draws.values(), default=0) <= 1, f"two draws in flight: {draws}"
        assert 0 <= scheduler.kv_reserved_tokens <= scheduler.config.kv_capacity_tokens
        assert len(scheduler.in_flight_steps()) <= scheduler.config.steps_in_flight_limit
        return step

    scheduler.next_step = watched  # type: ignore[method-assign]


arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.floats(0, 60),
            "prompt": st.lists(st.integers(0, 49), min_size=1, max_size=40),
            "max_tokens": st.integers(1, 30),
            "stop": st.frozensets(st.integers(0, 49), max_size=3),
            "score": st.booleans(),
            "cancel_after": st.none() | st.none() | st.floats(0, 40),
        }
    ),
    min_size=1,
    max_size=10,
)


def start_all(pipeline: Pipeline, entries: list[dict]) -> dict[int, dict]:
    """Let every arrival happen; the returned map fills as sessions start."""
    started: dict[int, dict] = {}

    def arrive(entry: dict) -> None:
        request = make_request(
            tuple(entry["prompt"]),
            entry["max_tokens"],
            stop_token_ids=entry["stop"],
            score_prompt=entry["score"],
        )
        session = pipeline.scheduler.add(request)
        started[session] = entry
        if entry["cancel_after"] is not None:
            moment = pipeline.now + entry["cancel_after"]
            pipeline.at(moment, lambda: entry.update(hit=pipeline.scheduler.cancel(session)))

    for entry in entries:
        pipeline.at(entry["at"], lambda entry=entry: arrive(entry))
    return started


def check_outcomes(pipeline: Pipeline, started: dict[int, dict]) -> None:
    """Each sequence ended as it does alone, or was cut by its cancel."""
    for session, entry in started.items():
        limit = min(entry["max_tokens"], CONTEXT - len(entry["prompt"]))
        alone = expected_tokens(tuple(entry["prompt"]), limit=limit, stop=entry["stop"])
        heard = [event.token for _, event in pipeline.events if event.session_id == session]
        tokens = [token.token_id for token in heard]
        if entry.get("hit"):
            assert tokens == alone[: len(tokens)]
            assert all(token.finish_reason is None for token in heard)
            continue
        assert tokens == alone
        reason = "stop" if alone[-1] in entry["stop"] else "length"
        assert [t.finish_reason for t in heard] == [None] * (len(heard) - 1) + [reason]
        prompt = entry["prompt"]
        scores = [target_score(prompt[:i], prompt[i]) for i in range(1, len(prompt))]
        assert heard[0].prompt_scores == ((None, *scores) if entry["score"] else ())
    assert pipeline.scheduler.is_idle
    assert pipeline.scheduler.kv_reserved_tokens == 0
    for stage in pipeline.stages:
        assert stage.sessions == {}, "every cache is freed"


@settings(max_examples=150, deadline=None)
@given(
    arrivals,
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([1, 7, 16, 64]),
    st.integers(CONTEXT, 200),
)
def test_random_arrivals_and_cancels(entries, num_stages, extra, max_step_tokens, capacity):
    pipeline = make_pipeline(
        num_stages=num_stages,
        capacity=capacity,
        context=CONTEXT,
        max_step_tokens=max_step_tokens,
        max_steps_in_flight=num_stages + extra,
    )
    watch_flights(pipeline)
    started = start_all(pipeline, entries)
    pipeline.run()
    assert len(started) == len(entries)
    check_steps(pipeline)
    check_outcomes(pipeline, started)


@settings(max_examples=100, deadline=None)
@given(
    arrivals,
    st.integers(1, 3),
    st.lists(st.tuples(st.floats(0, 120), st.booleans()), min_size=1, max_size=3),
)
def test_restarts_change_no_token(entries, num_stages, restarts):
    pipeline = make_pipeline(
        num_stages=num_stages, capacity=150, context=CONTEXT, max_step_tokens=16
    )
    watch_flights(pipeline)
    started = start_all(pipeline, entries)

    def restart(survivors_keep_caches: bool) -> None:
        kept = [dict(stage.sessions) for stage in pipeline.stages]
        pipeline.drop_steps()
        if survivors_keep_caches:
            for stage, sessions in zip(pipeline.stages[1:], kept[1:], strict=True):
                stage.sessions = sessions
        pipeline.scheduler.restart_all()

    for moment, survivors_keep_caches in restarts:
        pipeline.at(moment, lambda keep=survivors_keep_caches: restart(keep))
    pipeline.run()
    check_steps(pipeline)
    check_outcomes(pipeline, started)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.integers(1, 3), st.sets(st.integers(1, 40), min_size=1, max_size=5))
def test_failed_steps_end_their_sequences_and_free_the_rest(entries, num_stages, broken):
    pipeline = make_pipeline(
        num_stages=num_stages, capacity=150, context=CONTEXT, max_step_tokens=16
    )
    failure = StepFailure(node_id="n", stage=0, operation="o", error_type="E", message="m")

    def break_some(result: StepResult) -> StepResult:
        is_broken = result.step_id in broken
        return replace(result, tokens=(), failure=failure) if is_broken else result

    pipeline.on_result = break_some
    started = start_all(pipeline, entries)
    pipeline.run()
    check_steps(pipeline)
    failed = {event.session_id for _, event in pipeline.events if event.failure is not None}
    for session in failed:
        own = [event for _, event in pipeline.events if event.session_id == session]
        assert [event.failure is None for event in own] == [True] * (len(own) - 1) + [False]
    check_outcomes(pipeline, {s: entry for s, entry in started.items() if s not in failed})


def busy_share(pipeline: Pipeline, *, start: float, end: float) -> list[float]:
    """The part of a time span in which each stage computed, once all is warm."""
    before: list[float] = []
    pipeline.at(start, lambda: before.extend(stage.busy_seconds for stage in pipeline.stages))
    pipeline.run(until=end)
    # busy_seconds counts a step when it starts, so the end may be over by one step.
    return [
        (stage.busy_seconds - old) / (end - start)
        for stage, old in zip(pipeline.stages, before, strict=True)
    ]


@pytest.mark.parametrize(
    ("num_streams", "num_stages"), [(8, 2), (9, 2), (2, 2), (8, 3), (8, 4), (4, 4)]
)
def test_all_stages_work_in_the_steady_state(num_streams, num_stages):
    pipeline = make_pipeline(num_stages=num_stages)
    for i in range(num_streams):
        pipeline.scheduler.add(make_request((i, i + 1), 2_000))
    assert min(busy_share(pipeline, start=50, end=550)) > 0.97
    sizes = {len(step.segments) for moment, step in pipeline.sent if moment > 50}
    assert max(sizes) == -(-num_streams // num_stages)


def test_eight_streams_that_come_one_by_one_end_up_as_two_steps_of_four():
    pipeline = make_pipeline(num_stages=2)
    for i in range(8):
        pipeline.at(
            i * 3.3, lambda i=i: pipeline.scheduler.add(make_request((i,) * (i + 1), 2_000))
        )
    assert min(busy_share(pipeline, start=80, end=580)) > 0.97
    assert {len(step.segments) for moment, step in pipeline.sent if moment > 80} == {4}


def test_negative_control_one_step_for_all_leaves_stages_idle():
    # The same pipeline, but a scheduler that believes in one stage puts all streams in one step.
    config = SchedulerConfig(num_stages=1, kv_capacity_tokens=100_000, max_context_tokens=5_000)
    pipeline = Pipeline(Scheduler(config), num_stages=2)
    for i in range(8):
        pipeline.scheduler.add(make_request((i, i + 1), 2_000))
    assert max(busy_share(pipeline, start=50, end=550)) < 0.6


def longest_gap(pipeline: Pipeline, session: int) -> float:
    """The longest time between two tokens of a session."""
    moments = [moment for moment, event in pipeline.events if event.session_id == session]
    return max(b - a for a, b in pairwise(moments))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_streams", [1, 3, 8])
def test_a_long_prompt_delays_a_decode_by_one_chunk_at_most(num_stages, num_streams):
    budget = 64

    def run(long_prompt: int) -> Pipeline:
        pipeline = make_pipeline(num_stages=num_stages, max_step_tokens=budget)
        for i in range(num_streams):
            pipeline.scheduler.add(make_request((i,), 150))
        if long_prompt:
            request = make_request((1,) * long_prompt, 1)
            pipeline.at(20.7, lambda: pipeline.scheduler.add(request))
        pipeline.run()
        return pipeline

    quiet, disturbed = run(0), run(1000)
    # A chunk costs its tokens and one more step at each stage.
    one_chunk = num_stages * (1.0 + 0.05 * budget)
    for session in range(1, num_streams + 1):
        assert disturbed.tokens_of(session) == quiet.tokens_of(session)
        gap, quiet_gap = longest_gap(disturbed, session), longest_gap(quiet, session)
        assert quiet_gap < gap <= quiet_gap + one_chunk
    # What stands before a decode, in its step and in those ahead of it, is one budget of prefill.
    for _, step in disturbed.sent:
        assert step.num_tokens <= budget


def test_negative_control_an_unchunked_prompt_delays_decodes_for_longer():
    pipeline = make_pipeline(num_stages=2, max_step_tokens=5_000)
    pipeline.scheduler.add(make_request((1,), 150))
    pipeline.at(20.7, lambda: pipeline.scheduler.add(make_request((1,) * 1000, 1)))
    pipeline.run()
    assert longest_gap(pipeline, 1) > 3 + 2 * (1.0 + 0.05 * 64)


def send_twice(pipeline: Pipeline) -> None:
    """Every tenth step goes out a second time."""
    send, again = pipeline.scheduler.next_step, []

    def doubled():
        if again:
            return again.pop()
        step = send()
        if step is not None and step.step_id % 10 == 0:
            again.append(step)
        return step

    pipeline.scheduler.next_step = doubled  # type: ignore[method-assign]


def forget_releases(pipeline: Pipeline) -> None:
    send = pipeline.scheduler.next_step

    def kept():
        step = send()
        return step and replace(step, release_session_ids=())

    pipeline.scheduler.next_step = kept  # type: ignore[method-assign]


@pytest.mark.parametrize("sabotage", [send_twice, forget_releases])
def test_negative_control_the_stages_notice_wrong_steps(sabotage: Callable[[Pipeline], None]):
    pipeline = make_pipeline(capacity=60, context=40)
    sabotage(pipeline)
    for i in range(6):
        pipeline.scheduler.add(make_request((i,), 30))
    with pytest.raises(AssertionError, match=r"holds \d+ tokens|in a cache of"):
        pipeline.run()


def test_negative_control_admission_without_a_budget_overfills_the_caches(monkeypatch):
    monkeypatch.setattr(KVBudget, "fits", lambda self, num_tokens: True)
    pipeline = make_pipeline(capacity=60, context=40)
    for i in range(6):
        pipeline.scheduler.add(make_request((i,), 30))
    with pytest.raises(AssertionError, match="in a cache of 60"):
        pipeline.run()
