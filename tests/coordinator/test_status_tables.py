"""Tables of a cluster's status on a narrow terminal."""

import io

from rich.console import Console

from coordinator.commands.render import status_tables
from stagemesh.rpc.v1 import coordinator_pb2, node_pb2, profile_pb2

ADDRESS = "gpu-host-17.rack-4.example.org:7100"


def shown(status: coordinator_pb2.ClusterStatus, *, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in status_tables(status):
        console.print(part)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    return text


def test_nothing_is_cut_at_80_columns() -> None:
    name = "a-node-with-a-long-name"
    description = node_pb2.NodeDescription(
        node_id=name, address=ADDRESS, device="cuda:0", num_threads=16, memory_bytes=128 * 2**30
    )
    status = coordinator_pb2.ClusterStatus(
        nodes=[
            coordinator_pb2.ClusterNode(
                status=node_pb2.NodeStatus(description=description, rss_bytes=2**30), state="ready"
            )
        ],
        links=[
            coordinator_pb2.ClusterLink(
                source="coordinator",
                link=profile_pb2.LinkProfile(
                    node_id=name, latency_seconds=1e-3, bytes_per_second=1e9, sum_slowdown=1.25
                ),
            )
        ],
    )
    text = shown(status, width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert "1.25 x" in text
    # Folded cells have all their letters, one piece below the other.
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    assert ADDRESS in "".join(row[2].strip() for row in rows if len(row) == 7)
    # Negative control: with room for them the cells are whole.
    assert ADDRESS in shown(status, width=200)
