"""Links: the messages between a rank's stages and those of other ranks.

Receives begin before they are needed, and sends run beside the computation; a payload's memory is
held until its send has ended. A message is found by its tag, which says the product it carries;
messages of one tag keep their order, so steps follow each other without a barrier.
"""

from collections import deque
from collections.abc import Sequence
from typing import Self

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.work import Work
from stagemesh.parallel.pipeline.payload import Payload, read_payload
from stagemesh.schedule.actions import Action, Product, moved_by, receiver_of
from stagemesh.schedule.schedule import Schedule

_MAX_SENDS = 32
"""Messages that may be on their way at once; more wait for the oldest. That a rank may wait so
without a deadlock is what the order of the schedule's transfers is for."""


class Links:
    """The pipeline's messages of one rank, for one run of a program."""

    def __init__(
        self, process_group: ProcessGroup, *, schedule: Schedule, send_seconds: float
    ) -> None:
        """Nothing moves yet.

        Args:
            process_group: of the pipeline; no other messages go through it.
            schedule: says which rank has which stage.
            send_seconds: deadline of a send, which may have to wait for its receive.
        """
        self._group = process_group
        self._schedule = schedule
        self._send_seconds = send_seconds
        self._receives: dict[Product, Work[torch.Tensor]] = {}
        self._sends: deque[tuple[Work[None], torch.Tensor]] = deque()

    def begin_receive(self, action: Action) -> None:
        """Begin to receive the first message of what a receive action moves."""
        product = moved_by(action)
        self._receives[product] = self._receive(product)

    def take(self, product: Product) -> Payload:
        """What was received; waits for it.

        Raises:
            CommError: it did not come.
            ProtocolError: it is no payload.
        """
        first = self._receives.pop(product).wait()

        def read_next(count: int) -> Sequence[torch.Tensor]:
            works = [self._receive(product) for _ in range(count)]
            return [work.wait() for work in works]

        return read_payload(first, read_next=read_next)

    def begin_send(self, product: Product, payload: Payload) -> None:
        """Begin to send a product to the rank that needs it.

        Raises:
            CommError: an earlier send failed.
        """
        while self._sends and self._sends[0][0].is_completed():
            self._end_oldest()
        peer = self._schedule.stage_ranks[receiver_of(product)]
        for message in payload.messages():
            if len(self._sends) == _MAX_SENDS:
                self._end_oldest()
            work = self._group.isend(
                message, dst=peer, tag=self._tag(product), timeout=self._send_seconds
            )
            self._sends.append((work, message))

    def finish(self) -> None:
        """Wait until all sends have ended.

        Raises:
            CommError: one failed, or its receiver does not go on.
        """
        while self._sends:
            self._end_oldest()

    def _end_oldest(self) -> None:
        # They end one after the other as the receiver goes on, so the group's deadline is for each.
        work, _ = self._sends.popleft()
        work.wait(self._group.timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # The traceback of a failure keeps this object. Gloo closes a connection, which is how the
        # other ranks hear of an abort, only when nobody holds an operation on it any more.
        self._receives.clear()
        self._sends.clear()

    def _receive(self, product: Product) -> Work[torch.Tensor]:
        peer = self._schedule.stage_ranks[product.stage]
        work: Work[torch.Tensor] = self._group.recv_tensor(
            src=peer, tag=self._tag(product), async_op=True
        )
        return work

    def _tag(self, product: Product) -> int:
        place = product.microbatch * self._schedule.num_stages + product.stage
        return 2 * place + (product.kind == "gradient")
