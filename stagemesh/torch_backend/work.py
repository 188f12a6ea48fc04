"""What a collective returns to torch: a Work that can be waited for, and its Future."""

import concurrent.futures
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from stagemesh.errors import CollectiveTimeout, GroupAborted, NotReady

Pending = concurrent.futures.Future[Any]

# What torch's C++ side passes for "no limit of its own".
_NO_TIMEOUT = timedelta(0)


class MeshWork(Work):
    """An operation under way on the loop thread."""

    def __init__(
        self,
        pending: Pending,
        *,
        outputs: Sequence[torch.Tensor],
        operation: str,
        callbacks: concurrent.futures.Executor,
    ) -> None:
        """Make the handle of an operation.

        Args:
            pending: ends with the operation; that of a receive with the rank that sent.
            outputs: the tensors that hold its result then.
            operation: its name in errors.
            callbacks: where callbacks of the future run. Not on the loop thread: they may start
                another collective and wait for it.
        """
        super().__init__()
        self._pending = pending
        self._outputs = list(outputs)
        self._operation = operation
        self._callbacks = callbacks
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end. Without a timeout the operation's own deadline bounds it.

        Raises:
            CollectiveTimeout: `timeout` passed first; the operation goes on.
            StagemeshError: what the operation raised: PeerLost, CollectiveMismatch, ...
        """
        seconds = None
        if timeout is not None and timeout > _NO_TIMEOUT:
            seconds = timeout.total_seconds()
        done, _ = concurrent.futures.wait([self._pending], timeout=seconds)
        if not done:
            raise CollectiveTimeout(f"{self._operation} did not end in the {seconds:g} s of wait()")
        error = self._error()
        if error is not None:
            raise error
        return True

    def synchronize(self) -> None:
        """The same as `wait`: nothing of it runs on an accelerator's stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._pending.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._pending.done() and self._error() is None

    def exception(self) -> BaseException | None:
        """What it raised, once it has ended."""
        return self._error() if self._pending.done() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return self._outputs

    def source_rank(self) -> int:
        """Which rank sent what was received.

        Raises:
            NotReady: it has not ended, or is no receive.
        """
        source = self._pending.result() if self._pending.done() else None
        if not isinstance(source, int):
            raise NotReady(f"{self._operation} has no source: it has not ended, or is no receive")
        return source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the outputs. Its callbacks run on a thread of their own."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                self._pending.add_done_callback(lambda _: self._callbacks.submit(self._complete))
            return self._future

    def _complete(self) -> None:
        assert self._future is not None
        error = self._error()
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]  # a wrong stub

    def _error(self) -> Exception | None:
        if self._pending.cancelled():
            return GroupAborted(f"{self._operation} was cut off: its group was closed")
        error = self._pending.exception()
        # A bare BaseException ends the loop thread instead of an operation.
        assert error is None or isinstance(error, Exception)
        return error
