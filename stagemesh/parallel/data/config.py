"""Settings of DataParallel."""

from dataclasses import dataclass

import torch

from stagemesh.errors import ConfigError

_MIB = 2**20
_REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelConfig:
    """How gradients and buffers are shared; the same on all ranks."""

    bucket_bytes: int = 8 * _MIB
    """Gradients are reduced together until they are this large. Larger: fewer collectives; smaller:
    they begin earlier, and what a collective allocates meanwhile is smaller. Of 4, 8, 12 and 25 MiB
    this one took the least processor time over Gloo and gRPC."""
    first_bucket_bytes: int = _MIB
    """The same for the bucket that is ready first, so that communication begins early."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients travel. None: their own; a 16-bit type halves the traffic of
    float32. Sums are taken in float32 and rounded once, whatever travels."""
    sync_buffers: bool = True
    """Give all ranks the buffers of rank 0 before each forward that trains (running statistics of
    BatchNorm). Buffers that a state dict leaves out are constants: only wrapping sends them."""

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "first_bucket_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.reduce_dtype is not None and self.reduce_dtype not in _REDUCE_DTYPES:
            allowed = ", ".join(str(dtype) for dtype in _REDUCE_DTYPES)
            raise ConfigError(
                f"reduce_dtype must be None or one of {allowed}, got {self.reduce_dtype}"
            )
