"""Batches of next-token prediction out of one long sequence of tokens.

    tokens   t0 t1 t2 t3 t4 t5 t6 ...                 windows of T + 1, which overlap by one token
    window 0 [t0 .. tT]  window 1 [tT .. t2T] ...     in each epoch each window once, in an order
                                                      that depends on seed and epoch alone

A batch is a function of the number of sequences taken before it. That number is all that a
checkpoint has to know of the data, whatever the topology.
"""

import torch

from stagemesh.errors import ConfigError
from stagemesh.training.seeds import generator_of


class TokenBatches:
    """Draws batches from tokens."""

    def __init__(
        self, tokens: torch.Tensor, *, sequence_length: int, batch_size: int, seed: int
    ) -> None:
        """Cut the tokens into windows.

        Args:
            tokens: [N], ids.
            sequence_length: T.
            batch_size: B.
            seed: of the order.

        Raises:
            ConfigError: there are too few tokens for one window.
        """
        self.num_windows = (tokens.numel() - 1) // sequence_length
        if self.num_windows < 1:
            raise ConfigError(
                f"{tokens.numel()} tokens are too few for one sequence of {sequence_length}"
            )
        self._tokens = tokens
        self._length = sequence_length
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def batch(self, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch after so many sequences: inputs and targets, [B, T] each."""
        rows = [self._window(num_sequences + row) for row in range(self._batch_size)]
        batch = torch.stack(rows)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def first_batches(
        self, limit: int, *, multiple_of: int = 1
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """At most so many batches of windows in the order of the text, without the odd rest.

        A text that is too short for a batch gives one that is smaller.

        Args:
            limit: most batches.
            multiple_of: of which a smaller batch has a multiple of sequences; with fewer there is
                no batch.
        """
        size = min(self._batch_size, self.num_windows // multiple_of * multiple_of)
        count = min(limit, self.num_windows // size) if size else 0
        windows = [self._slice(index) for index in range(count * size)]
        starts = range(0, len(windows), max(1, size))
        batches = [torch.stack(windows[start : start + size]) for start in starts]
        return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in batches]

    def _window(self, position: int) -> torch.Tensor:
        epoch, index = divmod(position, self.num_windows)
        if epoch != self._epoch:
            generator = generator_of(self._seed, "epoch", epoch)
            self._order = torch.randperm(self.num_windows, generator=generator)
            self._epoch = epoch
        return self._slice(int(self._order[index]))

    def _slice(self, window: int) -> torch.Tensor:
        start = window * self._length
        return self._tokens[start : start + self._length + 1]


def split_tokens(tokens: torch.Tensor, *, held_out: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What to train on, and the end of the text to measure with."""
    cut = tokens.numel() - int(tokens.numel() * held_out)
    return tokens[:cut], tokens[cut:]
