"""Between wire messages and the values of stagemesh.steps; the version handshake. Torch-free.

Each value has a pair `x_to_proto` / `x_from_proto`. What comes from the wire is checked here, once:
whoever holds a `Step` may trust it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from stagemesh.errors import ConfigError, ProtocolError, VersionMismatch
from stagemesh.placement.tensor_shares import TensorShares
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
from stagemesh.version import PROTOCOL_MAJOR, PROTOCOL_MINOR, SOFTWARE_VERSION

MAX_TOP_LOGPROBS = 100
"""Most alternatives per token that a segment may ask for; equals the limit of SamplingParams."""

# The wire has 32-bit floats: a smaller top_p would arrive as 0, which is not allowed.
_MIN_TOP_P = 1e-37


def our_version() -> common_pb2.ProtocolVersion:
    """The version that this process speaks, for the handshake."""
    return common_pb2.ProtocolVersion(
        major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, software=SOFTWARE_VERSION
    )


def check_version(version: common_pb2.ProtocolVersion, *, peer: str) -> None:
    """Refuse a peer that speaks another major version, or did not say what it speaks.

    Raises:
        VersionMismatch: naming both versions.
    """
    ours = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR} (stagemesh {SOFTWARE_VERSION})"
    if version.major == 0:
        raise VersionMismatch(
            f"{peer} sent no protocol version; this node speaks {ours}. "
            "Install the same stagemesh release on both sides"
        )
    if version.major != PROTOCOL_MAJOR:
        software = version.software or "of unknown release"
        raise VersionMismatch(
            f"{peer} speaks protocol {version.major}.{version.minor} (stagemesh {software}); "
            f"this node speaks {ours}. Install the same stagemesh release on both sides"
        )


def tensor_shares_to_proto(shares: TensorShares) -> node_pb2.TensorShares:
    """What the ranks of a stage have, as a message."""
    return node_pb2.TensorShares(
        num_kv_heads=shares.num_kv_heads,
        query_heads=shares.query_heads,
        mlp_columns=shares.mlp_columns,
        vocab_rows=shares.vocab_rows,
    )


def tensor_shares_from_proto(message: node_pb2.TensorShares) -> TensorShares:
    """What the ranks of a stage have, out of a message.

    Raises:
        ConfigError: the numbers are no division of a layer.
    """
    return TensorShares(
        num_kv_heads=message.num_kv_heads,
        query_heads=tuple(message.query_heads),
        mlp_columns=tuple(message.mlp_columns),
        vocab_rows=tuple(message.vocab_rows),
    )


def sampling_to_proto(sampling: SamplingParams) -> node_pb2.SamplingParams:
    """Sampling parameters as a message."""
    return node_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=max(sampling.top_p, _MIN_TOP_P),
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        num_top_logprobs=sampling.num_top_logprobs,
        logprobs=sampling.logprobs,
    )


def sampling_from_proto(message: node_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters out of a message.

    Raises:
        ProtocolError: a value is outside its range.
    """
    try:
        return SamplingParams(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            seed=message.seed,
            logprobs=message.logprobs,
            num_top_logprobs=message.num_top_logprobs,
        )
    except ConfigError as error:
        raise ProtocolError(f"sampling parameters from the wire: {error}") from error


def segment_to_proto(segment: Segment) -> node_pb2.Segment:
    """A segment as a message."""
    sampling = None if segment.sampling is None else sampling_to_proto(segment.sampling)
    return node_pb2.Segment(
        session_id=segment.session_id,
        start_position=segment.start_position,
        num_tokens=segment.num_tokens,
        sampling=sampling,
        target_token_ids=segment.target_token_ids,
        num_target_top_logprobs=segment.num_target_top_logprobs,
    )


def segment_from_proto(message: node_pb2.Segment) -> Segment:
    """A segment out of a message.

    Raises:
        ProtocolError: it has no token, or counts that disagree.
    """
    where = f"segment of session {message.session_id}"
    if message.num_tokens < 1:
        raise ProtocolError(f"{where} has num_tokens 0; at least 1 is needed")
    num_targets = len(message.target_token_ids)
    if num_targets not in (0, message.num_tokens):
        raise ProtocolError(
            f"{where} has {num_targets} target token ids for {message.num_tokens} tokens"
        )
    if message.num_target_top_logprobs > MAX_TOP_LOGPROBS:
        raise ProtocolError(
            f"{where} asks for {message.num_target_top_logprobs} top log-probabilities; "
            f"at most {MAX_TOP_LOGPROBS} are returned"
        )
    return Segment(
        session_id=message.session_id,
        start_position=message.start_position,
        num_tokens=message.num_tokens,
        sampling=sampling_from_proto(message.sampling) if message.HasField("sampling") else None,
        target_token_ids=tuple(message.target_token_ids),
        num_target_top_logprobs=message.num_target_top_logprobs,
    )


def timing_to_proto(timing: StageTiming) -> node_pb2.StageTiming:
    """A stage's timing as a message."""
    return node_pb2.StageTiming(
        stage=timing.stage, queue_nanos=timing.queue_nanos, compute_nanos=timing.compute_nanos
    )


def timing_from_proto(message: node_pb2.StageTiming) -> StageTiming:
    """A stage's timing out of a message."""
    return StageTiming(
        stage=message.stage, queue_nanos=message.queue_nanos, compute_nanos=message.compute_nanos
    )


def step_header_to_proto(step: Step, timings: Sequence[StageTiming] = ()) -> node_pb2.StepHeader:
    """A step, with what the stages before this one took, as a message."""
    return node_pb2.StepHeader(
        step_id=step.step_id,
        segments=[segment_to_proto(segment) for segment in step.segments],
        token_ids=step.token_ids,
        release_session_ids=step.release_session_ids,
        timings=[timing_to_proto(timing) for timing in timings],
    )


def step_header_from_proto(message: node_pb2.StepHeader) -> tuple[Step, tuple[StageTiming, ...]]:
    """A step and the timings of the stages before, out of a message.

    Raises:
        ProtocolError: a segment is wrong, a session has two, or the token count disagrees.
    """
    segments = tuple(segment_from_proto(segment) for segment in message.segments)
    where = f"step {message.step_id}"
    sessions = Counter(segment.session_id for segment in segments)
    twice = [session_id for session_id, count in sessions.items() if count > 1]
    if twice:
        raise ProtocolError(f"{where} has more than one segment of session {twice[0]}")
    step = Step(
        step_id=message.step_id,
        segments=segments,
        token_ids=tuple(message.token_ids),
        release_session_ids=tuple(message.release_session_ids),
    )
    if step.token_ids and len(step.token_ids) != step.num_tokens:
        raise ProtocolError(
            f"{where} has {len(step.token_ids)} token ids, but its segments have "
            f"{step.num_tokens} tokens"
        )
    return step, tuple(timing_from_proto(timing) for timing in message.timings)


def _logprobs_to_proto(top: Iterable[TokenLogprob]) -> list[node_pb2.TokenLogprob]:
    return [node_pb2.TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in top]


def _logprobs_from_proto(top: Iterable[node_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in top)


def sampled_token_to_proto(token: SampledToken) -> node_pb2.SampledToken:
    """A segment's result as a message."""
    return node_pb2.SampledToken(
        session_id=token.session_id,
        has_token=token.token_id is not None,
        token_id=token.token_id or 0,
        logprob=token.logprob,
        top=_logprobs_to_proto(token.top),
        target_scores=[
            node_pb2.TargetScore(logprob=score.logprob, top=_logprobs_to_proto(score.top))
            for score in token.target_scores
        ],
    )


def sampled_token_from_proto(message: node_pb2.SampledToken) -> SampledToken:
    """A segment's result out of a message."""
    return SampledToken(
        session_id=message.session_id,
        token_id=message.token_id if message.has_token else None,
        logprob=message.logprob,
        top=_logprobs_from_proto(message.top),
        target_scores=tuple(
            TargetScore(logprob=score.logprob, top=_logprobs_from_proto(score.top))
            for score in message.target_scores
        ),
    )


def failure_to_proto(failure: StepFailure) -> node_pb2.StageFailure:
    """A stage's failure as a message."""
    return node_pb2.StageFailure(
        node_id=failure.node_id,
        stage=failure.stage,
        operation=failure.operation,
        error_type=failure.error_type,
        message=failure.message,
        traceback=failure.traceback,
    )


def failure_from_proto(message: node_pb2.StageFailure) -> StepFailure:
    """A stage's failure out of a message."""
    return StepFailure(
        node_id=message.node_id,
        stage=message.stage,
        operation=message.operation,
        error_type=message.error_type,
        message=message.message,
        traceback=message.traceback,
    )


def step_result_to_proto(result: StepResult) -> node_pb2.StepResult:
    """A step's result as a message."""
    return node_pb2.StepResult(
        step_id=result.step_id,
        tokens=[sampled_token_to_proto(token) for token in result.tokens],
        timings=[timing_to_proto(timing) for timing in result.timings],
        failure=None if result.failure is None else failure_to_proto(result.failure),
    )


def step_result_from_proto(message: node_pb2.StepResult) -> StepResult:
    """A step's result out of a message.

    Raises:
        ProtocolError: it has tokens and a failure.
    """
    has_failure = message.HasField("failure")
    if has_failure and message.tokens:
        raise ProtocolError(f"result of step {message.step_id} has both tokens and a failure")
    return StepResult(
        step_id=message.step_id,
        tokens=tuple(sampled_token_from_proto(token) for token in message.tokens),
        timings=tuple(timing_from_proto(timing) for timing in message.timings),
        failure=failure_from_proto(message.failure) if has_failure else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteError:
    """What a peer says about an error, beside the gRPC status."""

    type_name: str
    """Class name in stagemesh.errors, or of the remote exception."""
    message: str
    """Its text."""
    node_id: str = ""
    """Where it was raised."""
    operation: str = ""
    """What was being done."""
    traceback: str = ""
    """For a StageFailed: the stage's traceback."""


def remote_error_to_bytes(error: RemoteError) -> bytes:
    """The serialised ErrorDetail."""
    return common_pb2.ErrorDetail(
        type=error.type_name,
        message=error.message,
        node_id=error.node_id,
        operation=error.operation,
        traceback=error.traceback,
    ).SerializeToString()


def remote_error_from_bytes(data: bytes) -> RemoteError:
    """The value of a serialised ErrorDetail.

    Raises:
        ProtocolError: the bytes are not one.
    """
    try:
        detail = common_pb2.ErrorDetail.FromString(data)
    except DecodeError as error:
        raise ProtocolError("a peer's error detail does not parse") from error
    return RemoteError(
        type_name=detail.type,
        message=detail.message,
        node_id=detail.node_id,
        operation=detail.operation,
        traceback=detail.traceback,
    )
