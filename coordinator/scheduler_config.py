"""The scheduler's sizes and bounds, and what of a request they allow."""

from dataclasses import dataclass

from coordinator.generation import GenerationRequest
from stagemesh.errors import CapacityExceeded, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes of the pipeline and bounds of what it carries."""

    num_stages: int
    """Stages of the pipeline."""
    kv_capacity_tokens: int
    """Tokens that every stage's KV cache holds (`coordinator.kv_budget.kv_capacity_tokens`)."""
    max_context_tokens: int
    """Prompt plus generated tokens of one sequence."""
    max_step_tokens: int = 512
    """Token budget of a step."""
    max_steps_in_flight: int | None = None
    """Steps between the first stage's input and the last one's result; None is `num_stages`."""
    max_waiting: int = 256
    """Sequences that wait for KV room; one more is refused."""

    def __post_init__(self) -> None:
        for name in (
            "num_stages",
            "kv_capacity_tokens",
            "max_context_tokens",
            "max_step_tokens",
            "max_waiting",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps_in_flight_limit < self.num_stages:
            raise ConfigError(
                f"max_steps_in_flight is {self.max_steps_in_flight}: with fewer than the "
                f"{self.num_stages} stages some would always be idle"
            )

    @property
    def steps_in_flight_limit(self) -> int:
        """The number that applies."""
        return self.num_stages if self.max_steps_in_flight is None else self.max_steps_in_flight

    def limit_tokens(self, request: GenerationRequest) -> int:
        """Prompt plus generated tokens that a sequence may reach.

        Raises:
            ConfigError: the request is malformed.
            CapacityExceeded: it can never fit the context or the KV cache.
        """
        num_prompt = len(request.prompt_token_ids)
        context = self.max_context_tokens
        if num_prompt < 1:
            raise ConfigError("a prompt must have at least one token")
        if request.max_tokens < (0 if request.score_prompt else 1):
            raise ConfigError(
                f"max_tokens must be at least 1 (0 with score_prompt), got {request.max_tokens}"
            )
        num_needed = num_prompt + min(1, request.max_tokens)
        if num_needed > context:
            raise CapacityExceeded(
                f"the prompt has {num_prompt} tokens and the context holds {context}: there is no "
                f"room for {num_needed} tokens"
            )
        limit = min(num_prompt + request.max_tokens, context)
        if limit > self.kv_capacity_tokens:
            raise CapacityExceeded(
                f"prompt and max_tokens need {limit} tokens of KV cache, but the pipeline "
                f"holds {self.kv_capacity_tokens}: lower max_tokens or shorten the prompt"
            )
        return limit
