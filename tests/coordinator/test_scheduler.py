"""The scheduler's rules one by one, on steps written out by hand."""

import pytest

from coordinator.generation import GenerationRequest
from coordinator.scheduler import Scheduler
from coordinator.scheduler_config import SchedulerConfig
from coordinator.sequences import SequenceEvent
from stagemesh.errors import CapacityExceeded, ConfigError, ProtocolError
from stagemesh.steps import (
    SampledToken,
    SamplingParams,
    Segment,
    Step,
    StepFailure,
    StepResult,
    TargetScore,
)

SAMPLING = SamplingParams(temperature=0.5, seed=3)


def make_scheduler(**fields: int) -> Scheduler:
    defaults = {"num_stages": 1, "kv_capacity_tokens": 1000, "max_context_tokens": 100}
    return Scheduler(SchedulerConfig(**{**defaults, **fields}))


def make_request(prompt: int | tuple[int, ...] = 3, max_tokens: int = 5, **fields):
    tokens = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    return GenerationRequest(
        **{
            "request_id": "r",
            "model": "m",
            "prompt_token_ids": tokens,
            "max_tokens": max_tokens,
            "sampling": SAMPLING,
            **fields,
        }
    )


def step_of(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def answer(step: Step, token: int = 7) -> StepResult:
    """A result with the same token for each segment that wants one; scores are -position."""
    return StepResult(
        step_id=step.step_id,
        tokens=tuple(
            SampledToken(
                session_id=segment.session_id,
                token_id=token if segment.sampling else None,
                target_scores=tuple(
                    TargetScore(-float(segment.start_position + i))
                    for i in range(len(segment.target_token_ids))
                ),
            )
            for segment in step.segments
        ),
    )


def run_step(scheduler: Scheduler, token: int = 7) -> list[SequenceEvent]:
    return scheduler.complete(answer(step_of(scheduler), token))


def decode_all(scheduler: Scheduler) -> list[SequenceEvent]:
    """Go on until nothing is left to do."""
    events = []
    while (step := scheduler.next_step()) is not None:
        events += scheduler.complete(answer(step))
    return events


def shape(step: Step) -> list[tuple[int, int, int]]:
    """(session, start, tokens) of each segment."""
    return [(s.session_id, s.start_position, s.num_tokens) for s in step.segments]


def fail_result(step: Step) -> StepResult:
    failure = StepFailure(
        node_id="n", stage=0, operation="forward", error_type="ValueError", message="broken"
    )
    return StepResult(step_id=step.step_id, failure=failure)


def test_prefill_then_decode():
    scheduler = make_scheduler()
    session = scheduler.add(make_request(3, max_tokens=3))
    step = step_of(scheduler)
    assert step == Step(
        step_id=1,
        segments=(Segment(session_id=session, start_position=0, num_tokens=3, sampling=SAMPLING),),
        token_ids=(100, 101, 102),
    )
    assert scheduler.next_step() is None, "one step in flight per sequence"
    (event,) = scheduler.complete(answer(step, 7))
    assert (event.session_id, event.token.token_id, event.token.finish_reason) == (session, 7, None)
    step = step_of(scheduler)
    assert (step.step_id, shape(step), step.token_ids) == (2, [(session, 3, 1)], (7,))
    scheduler.complete(answer(step, 8))
    assert scheduler.accepted_token_ids(session) == (7, 8)
    (event,) = run_step(scheduler, 9)
    assert (event.token.token_id, event.token.finish_reason) == (9, "length")
    release = step_of(scheduler)
    assert (release.segments, release.release_session_ids) == ((), (session,))
    assert scheduler.complete(answer(release)) == []
    assert scheduler.is_idle


@pytest.mark.parametrize(
    ("fields", "num_tokens", "reason"),
    [
        ({"max_tokens": 4}, 4, "length"),
        ({"max_tokens": 1}, 1, "length"),
        ({"max_tokens": 4, "stop_token_ids": frozenset({7})}, 1, "stop"),
        ({"max_tokens": 1, "stop_token_ids": frozenset({7})}, 1, "stop"),
        ({"max_tokens": 4, "stop_token_ids": frozenset({8})}, 4, "length"),
        ({"prompt": 98, "max_tokens": 50}, 2, "length"),
        ({"prompt": 99, "max_tokens": 1}, 1, "length"),
    ],
)
def test_why_a_sequence_ends(fields, num_tokens, reason):
    scheduler = make_scheduler()
    scheduler.add(make_request(**fields))
    tokens = [event.token for event in decode_all(scheduler)]
    assert len(tokens) == num_tokens
    assert [token.finish_reason for token in tokens] == [None] * (num_tokens - 1) + [reason]
    assert scheduler.is_idle
    assert scheduler.kv_reserved_tokens == 0


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"prompt": 100}, CapacityExceeded, "prompt has 100 tokens and the context holds 100"),
        ({"prompt": 140}, CapacityExceeded, "prompt has 140 tokens and the context holds 100"),
        ({"prompt": 30, "max_tokens": 21}, CapacityExceeded, "need 51 tokens .* holds 50"),
        ({"prompt": ()}, ConfigError, "at least one token"),
        ({"max_tokens": 0}, ConfigError, "max_tokens must be at least 1"),
        ({"max_tokens": -1, "score_prompt": True}, ConfigError, "got -1"),
    ],
)
def test_what_can_never_run_is_refused(fields, error, text):
    scheduler = make_scheduler(kv_capacity_tokens=50)
    with pytest.raises(error, match=text):
        scheduler.add(make_request(**fields))
    assert scheduler.is_idle
    scheduler.add(make_request(30, max_tokens=20))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_stages": 0}, "num_stages"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"num_stages": 3, "max_steps_in_flight": 2}, "max_steps_in_flight is 2"),
    ],
)
def test_wrong_sizes_are_refused(fields, text):
    with pytest.raises(ConfigError, match=text):
        make_scheduler(**fields)


def test_admission_is_first_come_first_served_within_the_kv_room():
    scheduler = make_scheduler(kv_capacity_tokens=100, max_waiting=2)
    first = scheduler.add(make_request(40, max_tokens=1))
    big = scheduler.add(make_request(60, max_tokens=10))
    small = scheduler.add(make_request(5, max_tokens=1))
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    with pytest.raises(CapacityExceeded, match="2 sequences wait already"):
        scheduler.add(make_request())
    assert scheduler.kv_reserved_tokens == 41, "the small one fits, but none overtakes"
    run_step(scheduler)
    step = step_of(scheduler)
    assert shape(step) == [(big, 0, 60), (small, 0, 5)]
    assert step.release_session_ids == (first,), "the room is freed in the step that uses it"
    assert scheduler.kv_reserved_tokens == 76
    assert scheduler.kv_used_tokens == 65


def test_long_prompts_go_in_chunks_that_follow_each_other():
    scheduler = make_scheduler(num_stages=2, max_step_tokens=8)
    long = scheduler.add(make_request(20, max_tokens=2))
    short = scheduler.add(make_request(3, max_tokens=2))
    first, second = step_of(scheduler), step_of(scheduler)
    assert shape(first) == [(long, 0, 8)]
    assert shape(second) == [(long, 8, 8)]
    assert first.segments[0].sampling is None
    assert scheduler.next_step() is None, "as many steps in flight as stages"
    assert scheduler.complete(answer(first)) == []
    third = step_of(scheduler)
    assert shape(third) == [(long, 16, 4), (short, 0, 3)]
    assert [segment.sampling for segment in third.segments] == [SAMPLING, SAMPLING]
    assert third.token_ids == (*range(116, 120), *range(100, 103))


def test_decodes_are_spread_over_the_stages():
    scheduler = make_scheduler(num_stages=2)
    for _ in range(8):
        scheduler.add(make_request(2, max_tokens=50))
    run_step(scheduler)
    steps = [step_of(scheduler), step_of(scheduler)]
    assert [shape(step) for step in steps] == [
        [(session, 2, 1) for session in (1, 2, 3, 4)],
        [(session, 2, 1) for session in (5, 6, 7, 8)],
    ]
    assert scheduler.next_step() is None
    scheduler.complete(answer(steps[1]))
    assert shape(step_of(scheduler)) == [(session, 3, 1) for session in (5, 6, 7, 8)]


def test_no_step_waits_for_stragglers():
    scheduler = make_scheduler(num_stages=2)
    scheduler.add(make_request(2, max_tokens=50))
    run_step(scheduler)
    alone = step_of(scheduler)
    assert shape(alone) == [(1, 2, 1)], "a lone stream is a step of its own"
    scheduler.add(make_request(2, max_tokens=50))
    scheduler.complete(answer(step_of(scheduler)))
    assert shape(step_of(scheduler)) == [(2, 2, 1)], "the first one is still in flight"


def test_decodes_come_first_and_chunks_share_one_budget():
    scheduler = make_scheduler(num_stages=2, max_step_tokens=8)
    scheduler.add(make_request(2, max_tokens=50))
    run_step(scheduler)
    scheduler.add(make_request(40, max_tokens=5))
    steps = [step_of(scheduler), step_of(scheduler)]
    # 8 tokens of prefill in flight in all while a sequence decodes, half of them in each step.
    assert [shape(step) for step in steps] == [[(1, 2, 1), (2, 0, 4)], [(2, 4, 4)]]
    scheduler.complete(answer(steps[0]))
    assert shape(step_of(scheduler)) == [(1, 3, 1), (2, 8, 4)]


def test_cancel_while_waiting_idle_and_in_flight():
    scheduler = make_scheduler(kv_capacity_tokens=10)
    first = scheduler.add(make_request(3, max_tokens=5))
    second = scheduler.add(make_request(3, max_tokens=5))
    assert scheduler.cancel(second)
    assert scheduler.num_waiting == 0
    step = step_of(scheduler)
    assert scheduler.cancel(first)
    assert not scheduler.cancel(first), "known to be ended"
    assert scheduler.kv_reserved_tokens == 8, "its step is still in flight"
    assert scheduler.next_step() is None
    assert scheduler.complete(answer(step)) == [], "its token is ignored"
    assert step_of(scheduler).release_session_ids == (first,)
    assert not scheduler.cancel(first)
    assert not scheduler.cancel(99)


def test_cancel_before_anything_was_sent_releases_nothing():
    scheduler = make_scheduler()
    scheduler.cancel(scheduler.add(make_request()))
    assert scheduler.next_step() is None
    assert scheduler.is_idle


def test_cancel_between_chunks_sends_no_more_of_them():
    scheduler = make_scheduler(num_stages=2, max_step_tokens=4)
    session = scheduler.add(make_request(20))
    chunks = [step_of(scheduler), step_of(scheduler)]
    scheduler.cancel(session)
    scheduler.complete(answer(chunks[0]))
    assert scheduler.next_step() is None
    scheduler.complete(answer(chunks[1]))
    assert step_of(scheduler).release_session_ids == (session,)


def test_releases_ride_on_the_next_step_while_others_run():
    scheduler = make_scheduler()
    done = scheduler.add(make_request(2, max_tokens=1))
    other = scheduler.add(make_request(2, max_tokens=9))
    run_step(scheduler)
    step = step_of(scheduler)
    assert (shape(step), step.release_session_ids) == ([(other, 2, 1)], (done,))


def test_prompt_scores_over_chunks():
    scheduler = make_scheduler(max_step_tokens=2)
    sampling = SamplingParams(logprobs=True, num_top_logprobs=4)
    scheduler.add(make_request((5, 6, 7, 8), max_tokens=1, sampling=sampling, score_prompt=True))
    first = step_of(scheduler)
    assert first.segments[0].target_token_ids == (6, 7)
    assert first.segments[0].num_target_top_logprobs == 4
    assert scheduler.complete(answer(first)) == []
    second = step_of(scheduler)
    # The last prompt token has no known successor: its target only fills the place.
    assert second.segments[0].target_token_ids == (8, 8)
    (event,) = scheduler.complete(answer(second))
    assert event.token.token_id == 7
    assert event.token.prompt_scores == (None, *(TargetScore(-float(i)) for i in range(3)))


@pytest.mark.parametrize("prompt", [1, 3, 100])
def test_scores_without_a_token(prompt):
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt, max_tokens=0, score_prompt=True))
    step = step_of(scheduler)
    assert step.segments[0].sampling is None
    (event,) = scheduler.complete(answer(step))
    assert (event.token.token_id, event.token.finish_reason) == (None, "length")
    assert event.token.prompt_scores == (
        None,
        *(TargetScore(-float(i)) for i in range(prompt - 1)),
    )
    assert step_of(scheduler).release_session_ids == (1,)


def test_a_failed_step_ends_its_sequences_only():
    scheduler = make_scheduler(num_stages=2)
    for _ in range(4):
        scheduler.add(make_request(2, max_tokens=9))
    run_step(scheduler)
    broken, good = step_of(scheduler), step_of(scheduler)
    result = fail_result(broken)
    events = scheduler.complete(result)
    assert events == [SequenceEvent(session_id=i, failure=result.failure) for i in (1, 2)]
    assert len(scheduler.complete(answer(good))) == 2
    step = step_of(scheduler)
    assert (shape(step), step.release_session_ids) == ([(3, 3, 1)], (1, 2))
    assert scheduler.num_running == 2


def test_a_lost_chunk_fails_the_sequence_once_and_releases_after_the_other():
    scheduler = make_scheduler(num_stages=2, max_step_tokens=4)
    scheduler.add(make_request(20))
    chunks = [step_of(scheduler), step_of(scheduler)]
    assert scheduler.fail_step(chunks[0].step_id) == [1]
    assert scheduler.next_step() is None
    assert scheduler.fail_step(chunks[1].step_id) == []
    assert step_of(scheduler).release_session_ids == (1,)


def test_the_release_of_a_lost_step_is_said_again():
    scheduler = make_scheduler()
    scheduler.add(make_request(2, max_tokens=1))
    run_step(scheduler)
    release = step_of(scheduler)
    scheduler.fail_step(release.step_id)
    assert step_of(scheduler).release_session_ids == release.release_session_ids == (1,)


def test_fail_all_names_all_and_leaves_nothing():
    scheduler = make_scheduler(kv_capacity_tokens=20)
    for _ in range(3):
        scheduler.add(make_request(3, max_tokens=5))
    step = step_of(scheduler)
    assert scheduler.fail_all() == [1, 2, 3]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv_reserved_tokens) == (0, 0, 0)
    assert scheduler.in_flight_steps() == ()
    assert scheduler.complete(answer(step)) == [], "a result of the lost pipeline is ignored"


def test_restart_prefills_prompt_and_accepted_tokens():
    scheduler = make_scheduler(num_stages=2, max_step_tokens=4)
    first = scheduler.add(make_request((1, 2), max_tokens=6))
    run_step(scheduler, 11)
    run_step(scheduler, 12)
    second = scheduler.add(make_request((3,), max_tokens=6))
    lost = step_of(scheduler)
    assert scheduler.restart_all() == [first, second]
    assert scheduler.in_flight_steps() == ()
    step = step_of(scheduler)
    assert step.step_id > lost.step_id
    assert step.release_session_ids == (first, second)
    assert shape(step) == [(first, 0, 4)]
    assert step.token_ids == (1, 2, 11, 12)
    assert step.segments[0].sampling == SAMPLING, "the draw that was lost is drawn again"
    assert shape(step_of(scheduler)) == [(second, 0, 1)]
    assert scheduler.complete(answer(lost)) == [], "the lost step's result comes late"
    (event,) = scheduler.complete(answer(step, 13))
    assert event.token.token_id == 13
    assert scheduler.accepted_token_ids(first) == (11, 12, 13)


def test_restart_while_a_decode_is_ready_sends_it_once():
    scheduler = make_scheduler(num_stages=2)
    scheduler.add(make_request(2, max_tokens=4))
    run_step(scheduler)
    scheduler.restart_all()
    step = step_of(scheduler)
    assert shape(step) == [(1, 0, 3)]
    scheduler.complete(answer(step))
    assert shape(step_of(scheduler)) == [(1, 3, 1)]
    assert scheduler.next_step() is None


def test_a_lost_step_after_a_restart_releases_no_live_session():
    scheduler = make_scheduler(num_stages=2, max_step_tokens=3)
    for _ in range(2):
        scheduler.add(make_request(3))
    for _ in range(2):
        step_of(scheduler)
    scheduler.restart_all()
    first, second = step_of(scheduler), step_of(scheduler)
    assert first.release_session_ids == (1, 2)
    assert scheduler.fail_step(first.step_id) == [1]
    scheduler.complete(answer(second))
    step = step_of(scheduler)
    assert (shape(step), step.release_session_ids) == ([(2, 3, 1)], (1,))


def test_restart_asks_again_only_for_scores_that_were_not_handed_out():
    scheduler = make_scheduler(max_step_tokens=2)
    scheduler.add(make_request((5, 6, 7), max_tokens=3, score_prompt=True))
    scheduler.complete(answer(step_of(scheduler)))
    scheduler.restart_all()
    scheduler.complete(answer(step_of(scheduler)))
    (event,) = run_step(scheduler)
    assert event.token.prompt_scores == (None, TargetScore(-0.0), TargetScore(-1.0))
    scheduler.restart_all()
    assert step_of(scheduler).segments[0].target_token_ids == ()


def test_restart_forgets_the_cancelled():
    scheduler = make_scheduler()
    session = scheduler.add(make_request())
    step_of(scheduler)
    scheduler.cancel(session)
    assert scheduler.restart_all() == []
    assert step_of(scheduler).release_session_ids == (session,)
    assert scheduler.kv_reserved_tokens == 0


def wrong_results(step: Step) -> dict[str, StepResult]:
    token = SampledToken(session_id=step.segments[0].session_id, token_id=1)
    return {
        "not in flight": StepResult(step_id=99),
        "its result": StepResult(step_id=step.step_id),
        "has sessions": StepResult(
            step_id=step.step_id, tokens=(SampledToken(session_id=77, token_id=1),)
        ),
        "was asked for": StepResult(
            step_id=step.step_id, tokens=(SampledToken(session_id=token.session_id),)
        ),
        "0 targets, 1 scores": StepResult(
            step_id=step.step_id,
            tokens=(
                SampledToken(
                    session_id=token.session_id, token_id=1, target_scores=(TargetScore(0.0),)
                ),
            ),
        ),
    }


@pytest.mark.parametrize(
    "text", ["not in flight", "its result", "has sessions", "was asked for", "0 targets, 1 scores"]
)
def test_results_that_do_not_match_change_nothing(text):
    scheduler = make_scheduler()
    scheduler.add(make_request())
    step = step_of(scheduler)
    with pytest.raises(ProtocolError, match=text):
        scheduler.complete(wrong_results(step)[text])
    assert scheduler.in_flight_steps() == (step,)
    assert len(scheduler.complete(answer(step))) == 1
    with pytest.raises(ProtocolError, match="not in flight"):
        scheduler.complete(answer(step))
