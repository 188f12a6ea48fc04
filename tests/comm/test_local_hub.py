"""Faults in the groups of a LocalHub, as tests of programs with blocking groups set them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.local_hub import LocalHub
from stagemesh.errors import CollectiveTimeout, CommError, ConfigError, PeerLost

SIZE = 3


def _run(hub: LocalHub, rank: int, ended: threading.Barrier) -> BaseException | list[float]:
    config = GroupConfig(
        backend="local", rendezvous=hub, rank=rank, world_size=SIZE, timeout_seconds=0.5
    )
    with init_process_group(config) as group:
        try:
            for _ in range(3):
                total = group.all_reduce(torch.ones(2))
        except CommError as error:
            return error
        finally:
            # Who leaves first would be lost to those whose deadline is a moment later.
            ended.wait(timeout=10)
        return total.tolist()


def _outcomes(hub: LocalHub) -> list[BaseException | list[float]]:
    ended = threading.Barrier(SIZE)
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: _run(hub, rank, ended), range(SIZE)))


def test_a_rank_that_is_dropped_at_a_step_is_lost_to_the_others() -> None:
    with LocalHub() as hub:
        # Two messages for each all_reduce: this is in the middle of the second.
        hub.network(size=SIZE).drop_peer(1, step=3)
        outcomes = _outcomes(hub)
    for error in outcomes:
        assert isinstance(error, PeerLost)
        assert error.rank == 1
        assert str(error).startswith("all_reduce in group world failed on rank")
        assert "rank 1 is lost: it was dropped" in str(error)


def test_a_rank_that_hangs_at_a_step_is_waited_for_until_the_deadline() -> None:
    with LocalHub() as hub:
        hub.network(size=SIZE).hang_at(rank=1, step=2)
        outcomes = _outcomes(hub)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], CollectiveTimeout)
        assert "waiting for rank 1" in str(outcomes[rank])


def test_faults_of_another_group_do_no_harm() -> None:
    """Negative control."""
    with LocalHub() as hub:
        hub.network("another", size=SIZE).drop_peer(1, step=0)
        assert _outcomes(hub) == [[3.0, 3.0]] * SIZE


def test_wires_of_another_size_are_refused() -> None:
    with LocalHub() as hub:
        hub.network(size=2)
        with pytest.raises(ConfigError, match="group world has 2 ranks here, not 3"):
            _run(hub, 0, threading.Barrier(1))
