"""Work: an operation of a blocking group that was started with `async_op=True`."""

import concurrent.futures
from typing import Generic, TypeVar

from stagemesh.comm.comm_loop import CommLoop
from stagemesh.errors import CollectiveTimeout, NotReady

ResultT = TypeVar("ResultT")


class Work(Generic[ResultT]):
    """A running operation. Its tensors must be left alone until it has ended."""

    def __init__(
        self,
        future: "concurrent.futures.Future[ResultT]",
        *,
        loop: CommLoop,
        operation: str,
        limit_seconds: float,
    ) -> None:
        """Wrap what the loop runs.

        Args:
            future: of the loop.
            loop: which runs it.
            operation: its name in errors.
            limit_seconds: longer than the operation's own deadline.
        """
        self._future = future
        self._loop = loop
        self._operation = operation
        self._limit = limit_seconds

    def wait(self, timeout: float | None = None) -> ResultT:
        """What the operation gives, once it has ended; its error, if it failed.

        Args:
            timeout: seconds to wait here; the operation goes on when they pass, and may be waited
                for again. The operation has its own deadline beside it.

        Raises:
            CollectiveTimeout: `timeout` has passed, or the operation's own deadline.
            CommError: the operation failed.
        """
        if timeout is not None and not self._future.done():
            self._loop.check_caller()
            done, _ = concurrent.futures.wait([self._future], timeout=timeout)
            if not done:
                raise CollectiveTimeout(
                    f"{self._operation} has not ended in the {timeout:g} s of this wait; it goes on"
                )
        return self._loop.wait(self._future, timeout=self._limit, operation=self._operation)

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Why it failed; None while it runs and when it did not fail."""
        if not self._future.done():
            return None
        return self._future.exception()

    def result(self) -> ResultT:
        """What it gave.

        Raises:
            NotReady: it still runs.
            CommError: it failed.
        """
        if not self._future.done():
            raise NotReady(f"{self._operation} still runs; call wait() first")
        return self.wait()
