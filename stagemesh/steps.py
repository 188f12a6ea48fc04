"""What travels through a pipeline: steps of segments, and their results. Torch-free.

A step is one ragged micro-batch: a flat token axis [T] cut in segments, each the next tokens of one
session. Nothing is padded. `stagemesh.rpc.convert` maps these values to and from the wire.
"""

from dataclasses import dataclass, field

from stagemesh.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn; travels with each segment, so any last stage can draw it."""

    temperature: float = 0.0
    """0 is greedy: the most likely token, the lowest id of equals."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one, in [0, 1]."""
    seed: int = 0
    """With the position it determines the draw, whatever the placement. Unsigned 64-bit."""
    logprobs: bool = False
    """Return the log-probability of the drawn token."""
    num_top_logprobs: int = 0
    """Return this many most likely tokens with their log-probabilities."""

    def __post_init__(self) -> None:
        # Written so that NaN fails each check.
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(f"temperature must be in [0, 100], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ConfigError(f"top_k must be in [0, 2**31), got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed must be an unsigned 64-bit integer, got {self.seed}")
        if not 0 <= self.num_top_logprobs <= 100:
            raise ConfigError(f"num_top_logprobs must be in [0, 100], got {self.num_top_logprobs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one session inside a step."""

    session_id: int
    """The session, unique within a deployment."""
    start_position: int
    """Position of the segment's first token in the session."""
    num_tokens: int
    """How many tokens, at least one."""
    sampling: SamplingParams | None = None
    """When set, the token after the segment's last one is drawn."""
    target_token_ids: tuple[int, ...] = ()
    """When not empty, one per token: the last stage scores each as the successor of its token."""
    num_target_top_logprobs: int = 0
    """Most likely tokens returned beside each target's score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One ragged micro-batch for the pipeline."""

    step_id: int
    """Strictly increasing within a deployment's incarnation."""
    segments: tuple[Segment, ...] = ()
    """At most one per session."""
    token_ids: tuple[int, ...] = ()
    """Towards the first stage: the tokens of all segments, one after the other."""
    release_session_ids: tuple[int, ...] = ()
    """Sessions whose KV cache each stage frees before it computes."""

    @property
    def num_tokens(self) -> int:
        """Length of the token axis."""
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TargetScore:
    """Log-probability of a given token after its position, and the most likely alternatives."""

    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """What the last stage returns for one segment."""

    session_id: int
    """The session of the segment."""
    token_id: int | None = None
    """The drawn token; None for a segment that asked for none (a prefill chunk but the last)."""
    logprob: float = 0.0
    """Its log-probability, where asked for."""
    top: tuple[TokenLogprob, ...] = ()
    """Most likely tokens, where asked for."""
    target_scores: tuple[TargetScore, ...] = ()
    """One per target token id of the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTiming:
    """What one stage took for one step."""

    stage: int
    """Index of the stage."""
    queue_nanos: int
    """From arrival to the start of compute."""
    compute_nanos: int
    """On the compute thread."""


SEND_OPERATION = "send activation"
"""`operation` of a failure to reach the next stage: no later step will reach it either."""

GROUP_OPERATION = "compute with the other ranks"
"""`operation` of a failure that ended the group of a stage's ranks: no later step has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailure:
    """Why a step failed, and where."""

    node_id: str
    stage: int
    operation: str
    error_type: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What comes back for one step."""

    step_id: int
    """The step."""
    tokens: tuple[SampledToken, ...] = ()
    """One per segment, in the step's order."""
    timings: tuple[StageTiming, ...] = ()
    """One per stage, in pipeline order."""
    failure: StepFailure | None = field(default=None)
    """Set when a stage failed; then `tokens` is empty."""
