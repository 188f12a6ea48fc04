"""What the caches hold when a stage's turn comes: not what it left there, but what others used."""

import torch

_BYTES = 32 * 2**20


class OtherMemory:
    """Memory that is read to have it in the caches, in place of what a stage needs.

    Args:
        device: whose caches.
        num_bytes: as much as its caches hold.
    """

    def __init__(self, device: torch.device, *, num_bytes: int = _BYTES) -> None:
        # Written to, or it would all be one page of zeros.
        self._memory = torch.ones(max(1, num_bytes // 4), device=device)

    @torch.inference_mode()
    def read(self) -> None:
        """Read all of it, with all threads, and wait for that."""
        self._memory.sum()
        wait_for(self._memory.device)


def wait_for(device: torch.device) -> None:
    """Return when an accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
