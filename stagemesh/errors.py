"""The exception tree of stagemesh.

StagemeshError
|-- ConfigError (also ValueError)      a setting, flag or request field is wrong
|-- ModelError                         a model's files cannot be used
|   |-- ModelNotFound                  nothing is where the name or path points
|   |-- CheckpointError                a file is truncated, inconsistent or hostile
|   `-- UnsupportedModel               a family, format or layer type that we do not run
|-- PlacementError                     no placement fits the nodes
|-- CapacityExceeded                   a bound (KV cache, queue, message size) would be passed
|-- ProtocolError                      a peer sent something that the contract forbids
|   `-- VersionMismatch                a peer speaks another protocol version
|-- Unauthenticated                    a peer did not show the token
|-- NotReady                           what was asked for is not there yet, or no more
|-- StageFailed                        a stage raised; carries the remote type, text and traceback
`-- CommError                          communication between ranks or nodes failed
    |-- PeerLost                       a rank or node is gone
    |-- CollectiveMismatch             ranks called different operations, dtypes or shapes
    |-- CollectiveTimeout              the deadline of an operation passed
    `-- GroupAborted                   the group was aborted; carries the cause

`stagemesh.rpc.status` maps each class to one gRPC status; tests/test_status.py walks the tree.
"""


class StagemeshError(Exception):
    """Root of all errors that stagemesh raises on purpose."""


class ConfigError(StagemeshError, ValueError):
    """A setting, flag or request field has a value that is not allowed."""


class ModelError(StagemeshError):
    """A model's files cannot be used."""


class ModelNotFound(ModelError):
    """Nothing is where the model's name or path points."""


class CheckpointError(ModelError):
    """A model file is truncated, inconsistent or hostile."""


class UnsupportedModel(ModelError):
    """A model family, file format or layer type that stagemesh does not run."""


class PlacementError(StagemeshError):
    """No placement of the model fits the nodes."""


class CapacityExceeded(StagemeshError):
    """A bound (KV cache, queue, message size) would be passed."""


class ProtocolError(StagemeshError):
    """A peer sent something that the wire contract forbids."""


class VersionMismatch(ProtocolError):
    """A peer speaks another version of the protocol, or none."""


class Unauthenticated(StagemeshError):
    """A peer did not show the cluster's token."""


class NotReady(StagemeshError):
    """What was asked for is not there yet, or is there no more."""


class StageFailed(StagemeshError):
    """A stage raised while it computed.

    Args:
        message: the remote exception's text.
        node_id: the node that ran the stage.
        stage: index of the stage in the pipeline.
        operation: what the stage was doing.
        error_type: class name of the remote exception.
        remote_traceback: its traceback as text.
    """

    def __init__(
        self,
        message: str,
        *,
        node_id: str = "",
        stage: int = -1,
        operation: str = "",
        error_type: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.node_id = node_id
        self.stage = stage
        self.operation = operation
        self.error_type = error_type
        self.remote_traceback = remote_traceback


class CommError(StagemeshError):
    """Communication between ranks or nodes failed."""


class PeerLost(CommError):
    """A peer is gone: its process ended, its link broke or it fell silent.

    Args:
        message: the whole sentence for a person.
        rank: the peer's rank in the group, where there is one.
        node_id: the peer's node, where it is known.
    """

    def __init__(self, message: str, *, rank: int | None = None, node_id: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.node_id = node_id


class CollectiveMismatch(CommError):
    """Ranks called different operations, dtypes, shapes or reduce ops at the same step."""


class CollectiveTimeout(CommError):
    """The deadline of a send, receive or collective passed."""


class GroupAborted(CommError):
    """The group was aborted; the cause is in the message and in `__cause__`."""
