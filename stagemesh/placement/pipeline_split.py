"""PipelineParallel: which layers a stage has, who is before and after it, and what it costs."""

from stagemesh.errors import ConfigError
from stagemesh.placement.counts import proportional_counts, range_of
from stagemesh.placement.tensor_split import BYTES_PER_MB


class PipelineParallel:
    """One stage of an even pipeline.

    Args:
        num_stages: stages.
        stage: this one.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, num_stages: int, stage: int) -> None:
        if num_stages < 1:
            raise ConfigError(f"num_stages must be at least 1, got {num_stages}")
        if not 0 <= stage < num_stages:
            raise ConfigError(f"stage must be in [0, {num_stages}), got {stage}")
        self.num_stages = num_stages
        self.stage = stage
        self.num_layers: int | None = None

    def configure(self, num_layers: int) -> None:
        """Say how many layers there are.

        Raises:
            ConfigError: there are fewer layers than stages.
        """
        if num_layers < self.num_stages:
            raise ConfigError(
                f"{self.num_stages} stages were asked for, but the model has {num_layers} layers: "
                f"each stage needs at least one"
            )
        self.num_layers = num_layers

    def layer_range(self) -> tuple[int, int]:
        """Layers [start, end); the remainder goes to the first stages.

        Raises:
            ConfigError: `configure` was not called.
        """
        if self.num_layers is None:
            raise ConfigError("the number of layers is not known: call configure first")
        return range_of(self.stage, proportional_counts(self.num_layers, [1] * self.num_stages))

    def prev_stage(self) -> int | None:
        """The stage before; None for the first."""
        return None if self.is_first_stage else self.stage - 1

    def next_stage(self) -> int | None:
        """The stage after; None for the last."""
        return None if self.is_last_stage else self.stage + 1

    @property
    def is_first_stage(self) -> bool:
        """Whether it embeds."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the head."""
        return self.stage == self.num_stages - 1

    def activation_size_mb(self, hidden: int, seq: int, batch: int, dtype_bytes: int) -> float:
        """MB (10^6 bytes) of what it sends on: [batch, seq, hidden]."""
        return batch * seq * hidden * dtype_bytes / BYTES_PER_MB

    def bubble_ratio(self, micro_batches: int) -> float:
        """Part of the time in which a stage has nothing to do: (p - 1) / (p + m - 1).

        Raises:
            ConfigError: there is no micro-batch.
        """
        if micro_batches < 1:
            raise ConfigError(f"micro_batches must be at least 1, got {micro_batches}")
        return (self.num_stages - 1) / (self.num_stages + micro_batches - 1)
