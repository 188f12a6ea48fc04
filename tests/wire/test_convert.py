"""Steps and results to the wire and back; and the version handshake."""

import pytest

from stagemesh.errors import ProtocolError, VersionMismatch
from stagemesh.rpc import convert
from stagemesh.rpc.v1 import common_pb2, node_pb2
from stagemesh.steps import (
    SampledToken,
    SamplingParams,
    Segment,
    StageTiming,
    Step,
    StepFailure,
    StepResult,
    TargetScore,
    TokenLogprob,
)
from stagemesh.version import PROTOCOL_MAJOR, SOFTWARE_VERSION

# Values that 32-bit floats hold exactly.
SAMPLING = SamplingParams(
    temperature=0.75,
    top_p=0.5,
    top_k=40,
    min_p=0.125,
    seed=2**64 - 1,
    logprobs=True,
    num_top_logprobs=5,
)
STEP = Step(
    step_id=7,
    segments=(
        Segment(session_id=1, start_position=0, num_tokens=2),
        Segment(session_id=2**63, start_position=9, num_tokens=1, sampling=SAMPLING),
        Segment(
            session_id=3,
            start_position=1,
            num_tokens=2,
            target_token_ids=(4, 5),
            num_target_top_logprobs=2,
        ),
    ),
    token_ids=(1, 2, 3, 4, 5),
    release_session_ids=(8, 9),
)
TIMINGS = (StageTiming(stage=0, queue_nanos=1, compute_nanos=2**40),)


def test_a_step_round_trips():
    message = convert.step_header_to_proto(STEP, TIMINGS)
    parsed = node_pb2.StepHeader.FromString(message.SerializeToString())
    assert convert.step_header_from_proto(parsed) == (STEP, TIMINGS)


def test_greedy_sampling_is_not_no_sampling():
    sampled = Segment(session_id=1, start_position=0, num_tokens=1, sampling=SamplingParams())
    silent = Segment(session_id=1, start_position=0, num_tokens=1)
    for segment in (sampled, silent):
        message = convert.segment_to_proto(segment)
        assert convert.segment_from_proto(message) == segment


@pytest.mark.parametrize(
    "result",
    [
        StepResult(
            step_id=3,
            tokens=(
                SampledToken(
                    session_id=1,
                    token_id=0,
                    logprob=-0.5,
                    top=(TokenLogprob(0, -0.5), TokenLogprob(7, -1.5)),
                    target_scores=(TargetScore(-2.0, (TokenLogprob(1, -0.25),)),),
                ),
                SampledToken(session_id=2),
            ),
            timings=TIMINGS,
        ),
        StepResult(
            step_id=4,
            failure=StepFailure(
                node_id="n1",
                stage=1,
                operation="forward",
                error_type="ValueError",
                message="bad",
                traceback="line 1",
            ),
        ),
    ],
)
def test_a_result_round_trips(result):
    message = convert.step_result_to_proto(result)
    parsed = node_pb2.StepResult.FromString(message.SerializeToString())
    assert convert.step_result_from_proto(parsed) == result


def _segment(**fields) -> node_pb2.Segment:
    return node_pb2.Segment(**({"session_id": 1, "num_tokens": 2} | fields))


def _sampling(**fields) -> node_pb2.Segment:
    return _segment(sampling=node_pb2.SamplingParams(**({"top_p": 1.0} | fields)))


@pytest.mark.parametrize(
    ("segments", "token_ids", "text"),
    [
        ([_segment(num_tokens=0)], [], "num_tokens 0"),
        ([_segment(), _segment()], [], "session 1"),
        ([_segment()], [1], "1 token ids"),
        ([_segment()], [1, 2, 3], "3 token ids"),
        ([_segment(target_token_ids=[1])], [], "1 target token ids"),
        ([_segment(num_target_top_logprobs=101)], [], "101"),
        ([_sampling(top_p=0.0)], [], "top_p"),
        ([_sampling(temperature=float("nan"))], [], "temperature"),
        ([_sampling(min_p=2.0)], [], "min_p"),
        ([_sampling(num_top_logprobs=101)], [], "num_top_logprobs"),
        ([_sampling(top_k=2**31)], [], "top_k"),
    ],
)
def test_a_wrong_step_is_refused(segments, token_ids, text):
    message = node_pb2.StepHeader(step_id=1, segments=segments, token_ids=token_ids)
    with pytest.raises(ProtocolError, match=text):
        convert.step_header_from_proto(message)


def test_right_steps_beside_the_wrong_ones_pass():
    message = node_pb2.StepHeader(step_id=1, segments=[_sampling()], token_ids=[1, 2])
    step, _ = convert.step_header_from_proto(message)
    assert step.num_tokens == 2


def test_a_top_p_too_small_for_the_wire_stays_allowed():
    message = convert.sampling_to_proto(SamplingParams(top_p=1e-300))
    parsed = node_pb2.SamplingParams.FromString(message.SerializeToString())
    assert convert.sampling_from_proto(parsed).top_p > 0


def test_a_result_with_tokens_and_a_failure_is_refused():
    message = node_pb2.StepResult(tokens=[{"session_id": 1}], failure={"message": "x"})
    with pytest.raises(ProtocolError, match="both"):
        convert.step_result_from_proto(message)


def test_our_own_version_is_accepted_and_a_higher_minor_too():
    ours = convert.our_version()
    convert.check_version(ours, peer="n1")
    ours.minor += 1
    convert.check_version(ours, peer="n1")


def test_another_major_names_both_versions():
    theirs = common_pb2.ProtocolVersion(major=PROTOCOL_MAJOR + 1, minor=3, software="9.9.9")
    with pytest.raises(VersionMismatch) as caught:
        convert.check_version(theirs, peer="node n1")
    for word in (f"{PROTOCOL_MAJOR + 1}.3", "9.9.9", f"{PROTOCOL_MAJOR}.", SOFTWARE_VERSION, "n1"):
        assert word in str(caught.value)


def test_no_version_is_refused():
    with pytest.raises(VersionMismatch, match="no protocol version"):
        convert.check_version(node_pb2.DescribeRequest().version, peer="n1")
