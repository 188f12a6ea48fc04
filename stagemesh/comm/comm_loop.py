"""CommLoop: the one event loop of a process that owns its gRPC objects, for callers on threads.

    with CommLoop() as loop:
        loop.run(coroutine(), timeout=30.0)

gRPC's objects belong to the loop they were made on, and several loops in one process disturb each
other. So there is one loop in one thread, and all groups of a process share it. Calls start on the
loop in the order in which they were submitted, from whichever thread.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from stagemesh.comm.tasks import cancel_and_wait
from stagemesh.errors import CollectiveTimeout, ConfigError, NotReady

_START_SECONDS = 10.0
_STOP_SECONDS = 10.0
_CANCEL_SECONDS = 2.0

ResultT = TypeVar("ResultT")


class CommLoop:
    """An event loop in a thread of its own, or a loop that somebody else runs."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Take a loop, or start one in a new thread.

        Args:
            loop: a loop that runs already, as that of a daemon; `close` leaves it running.
        """
        self._is_closed = False
        # Nothing is submitted after the stop, so whatever was submitted also ends.
        self._submitting = threading.Lock()
        self._tasks: dict[concurrent.futures.Future[Any], asyncio.Task[Any]] = {}
        self._thread: threading.Thread | None = None
        if loop is not None:
            self._loop = loop
            return
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._loop.call_soon(started.set)
        # A daemon: a script that ends without `close` must end.
        self._thread = threading.Thread(target=self._serve, name="stagemesh-comm", daemon=True)
        self._thread.start()
        if not started.wait(_START_SECONDS):
            raise CollectiveTimeout(f"the event loop did not start in {_START_SECONDS:g} s")

    def submit(
        self, coroutine: Coroutine[Any, Any, ResultT]
    ) -> "concurrent.futures.Future[ResultT]":
        """Start a coroutine on the loop; the future ends when it has ended, also when cancelled.

        Raises:
            ConfigError: called on the loop's own thread, which would wait for itself.
            NotReady: the loop is closed.
        """
        future: concurrent.futures.Future[ResultT] = concurrent.futures.Future()
        try:
            self.check_caller()
            with self._submitting:
                self._check_open()
                self._loop.call_soon_threadsafe(self._begin, coroutine, future)
        except BaseException:
            coroutine.close()
            raise
        return future

    def run(self, coroutine: Coroutine[Any, Any, ResultT], *, timeout: float) -> ResultT:
        """Start a coroutine and wait for what it gives.

        Raises:
            CollectiveTimeout: it has not ended in `timeout` seconds; it is cancelled.
            ConfigError, NotReady: as in `submit`.
        """
        return self.wait(self.submit(coroutine), timeout=timeout, operation="an operation")

    def wait(
        self, future: "concurrent.futures.Future[ResultT]", *, timeout: float, operation: str
    ) -> ResultT:
        """Wait for what `submit` gave; what is not done in time, or interrupted, is cancelled.

        Raises:
            CollectiveTimeout: it has not ended in `timeout` seconds.
            ConfigError: called on the loop's own thread.
            NotReady: the loop was closed before it ended.
        """
        if not future.done():
            self.check_caller()
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                raise
            self._cancel(future)
            raise CollectiveTimeout(
                f"{operation} did not end in {timeout:g} s and was cancelled"
            ) from None
        except BaseException:
            # Such as Ctrl-C: nobody waits any more, so nothing may change the tensors either.
            if not future.done():
                self._cancel(future)
            raise

    def close(self) -> None:
        """Cancel what runs, stop the loop and join its thread. May be called again.

        Raises:
            ConfigError: called on the loop's own thread.
            CollectiveTimeout: the thread does not end.
        """
        if self._is_closed:
            return
        self.check_caller()
        with self._submitting:
            self._is_closed = True
            if self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise CollectiveTimeout(
                f"the event loop's thread did not end in {_STOP_SECONDS:g} s: a callback blocks it"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def check_caller(self) -> None:
        """Refuse to block the loop's own thread.

        Raises:
            ConfigError: this is it.
        """
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                raise ConfigError(
                    "a blocking group was called on its event loop's own thread, which would wait "
                    "for itself for ever: call it on another thread, or await the AsyncGroup"
                )

    def _check_open(self) -> None:
        if self._is_closed or self._loop.is_closed():
            raise NotReady("the group's event loop is closed")

    def _begin(
        self,
        coroutine: Coroutine[Any, Any, ResultT],
        future: "concurrent.futures.Future[ResultT]",
    ) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks[future] = task
        task.add_done_callback(lambda _: self._end(task, future))

    def _end(
        self, task: "asyncio.Task[ResultT]", future: "concurrent.futures.Future[ResultT]"
    ) -> None:
        del self._tasks[future]
        if task.cancelled():
            future.set_exception(NotReady("the operation was cancelled: its event loop ended"))
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def _cancel(self, future: "concurrent.futures.Future[Any]") -> None:
        """Cancel on the loop and wait until it has ended; bounded, as the loop may hang itself."""

        def cancel() -> None:
            if (task := self._tasks.get(future)) is not None:
                task.cancel()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(cancel)
            concurrent.futures.wait([future], timeout=_CANCEL_SECONDS)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _end_tasks(self) -> None:
        await cancel_and_wait(asyncio.all_tasks(self._loop) - {asyncio.current_task()})
