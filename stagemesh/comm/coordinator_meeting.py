"""Meeting at a running coordinator, by the name of the group."""

from dataclasses import dataclass, field

import grpc.aio

from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.member_record import member_from_proto, member_to_proto
from stagemesh.comm.rendezvous import Arrival, Meeting
from stagemesh.errors import ConfigError
from stagemesh.rpc.channels import open_channel, wait_ready
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.status import from_rpc_error
from stagemesh.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc

_LOOP_MARGIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorMeeting:
    """A running coordinator; it also assigns ranks to those that bring none."""

    address: str
    """host:port of the coordinator's gRPC server."""
    token: str | None = field(default=None, repr=False)
    """The cluster's token."""

    def meet(self, arrival: Arrival, *, loop: CommLoop) -> Meeting:
        """Tell the coordinator who is here, and wait for its answer."""
        if arrival.world_size is None:
            raise ConfigError("world_size must be set: the coordinator waits for that many")
        return loop.run(
            self._ask(arrival), timeout=2 * arrival.timeout_seconds + _LOOP_MARGIN_SECONDS
        )

    async def _ask(self, arrival: Arrival) -> Meeting:
        assert arrival.world_size is not None
        channel = open_channel(self.address, token=self.token, kind="control")
        request = coordinator_pb2.RendezvousRequest(
            version=our_version(),
            group_id=arrival.group_id,
            world_size=arrival.world_size,
            rank=arrival.rank,
            # The rank is said above, or not known yet.
            member=member_to_proto(arrival.member(0)),
            timeout_seconds=arrival.timeout_seconds,
        )
        try:
            await wait_ready(channel, address=self.address, timeout_seconds=arrival.timeout_seconds)
            reply = await coordinator_pb2_grpc.CoordinatorServiceStub(channel).Rendezvous(
                request, timeout=arrival.timeout_seconds + _LOOP_MARGIN_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(
                error, operation=f"Rendezvous of group {arrival.group_id}", peer=self.address
            ) from error
        finally:
            await channel.close()
        members = tuple(
            member_from_proto(member, rank=rank) for rank, member in enumerate(reply.members)
        )
        return Meeting(rank=reply.rank, members=members, incarnation=reply.incarnation)
