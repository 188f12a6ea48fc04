"""Memory that operations use again: a fresh piece costs a page fault every 4 KiB."""

import threading

import torch

KEPT_BYTES = 64 * 2**20
"""What is kept of one group's."""


class Scratch:
    """Flat memory, lent and given back. Thread-safe."""

    def __init__(self, *, device: torch.device, kept_bytes: int = KEPT_BYTES) -> None:
        self._device = device
        self._limit = kept_bytes
        self._kept: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        """Memory of at least that size. Shapes: [bytes]."""
        with self._lock:
            for index, memory in enumerate(self._kept):
                if memory.numel() >= num_bytes:
                    return self._kept.pop(index)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def give_back(self, memory: torch.Tensor) -> None:
        """Nobody reads or writes it any more. What is not given back is freed as all memory."""
        with self._lock:
            self._kept.append(memory)
            self._kept.sort(key=torch.Tensor.numel)
            # The smallest go first: the large ones cost most.
            while sum(each.numel() for each in self._kept) > self._limit:
                self._kept.pop(0)
