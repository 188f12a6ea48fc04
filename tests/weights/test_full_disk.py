"""A weight cache on a disk that is really too small, and one that fills up meanwhile."""

import re
from pathlib import Path

import pytest

from stagemesh.errors import CapacityExceeded
from tests.cluster.asking import until
from tests.support.checkpoints import write_tiny_checkpoint
from tests.support.cluster import start_cluster, tiny_model
from tests.support.small_disk import small_disk
from tests.weights.serving import fetching_node, serve_model, stage_of

SMALL, LARGE = 128 * 1024, 64 * 2**20


async def test_a_full_disk_is_told_of_by_name_before_anything_is_sent(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    disk = tmp_path / "disk"
    with small_disk(disk, SMALL) as resize:
        settings = {"has_local_files": False, "cache_folder": disk / "cache"}
        async with start_cluster(model, num_nodes=1, wait=False, node_settings=settings) as cluster:
            await until(lambda: cluster.deployment.phase == "failed")
            told = cluster.deployment.detail
            assert "node-1" in told
            assert str(disk / "cache") in told
            whole = sum(info.num_bytes for info in cluster.deployment.spec.tensors.values())
            needed = re.search(r"needs (\S+) KiB more", told)
            assert needed is not None
            # Tensors of equal content are kept once.
            assert float(needed[1]) * 1024 == pytest.approx(whole, rel=0.02)
            assert f"{SMALL // 1024} KiB free" in told
            assert "--cache-dir" in told
            assert cluster.coordinator.weights.sent_bytes.total() == 0
            assert not list((disk / "cache").rglob("partial/*"))
            # Negative control: with room the same node loads and answers.
            resize(LARGE)
            await cluster.nodes["node-1"].stop()
            await cluster.add_node("node-1", **settings)
            await cluster.wait_ready()
            assert len(await cluster.generate([7, 8, 9], 4)) == 4
            assert cluster.coordinator.weights.sent_bytes.total() > 0


async def test_a_disk_that_fills_up_meanwhile_keeps_what_has_come(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    async with serve_model(write_tiny_checkpoint(tmp_path / "m", num_layers=8)) as served:
        whole = served.stage_bytes(0, 8)
        assert whole > SMALL
        with small_disk(disk, SMALL) as resize:
            # Something else takes the room after it was checked.
            with (
                fetching_node(
                    disk / "cache", coordinator=served.address, free_bytes=lambda _: LARGE
                ) as node,
                pytest.raises(CapacityExceeded, match=r"disk.*full|[Nn]o space left") as caught,
            ):
                await node.load(stage_of(served, 0, 8))
            assert str(disk / "cache") in str(caught.value)
            sent = served.sent_bytes
            resize(LARGE)
            with fetching_node(disk / "cache", coordinator=served.address) as node:
                kept = sum(p.stat().st_size for p in (disk / "cache").rglob("*") if p.is_file())
                assert kept > SMALL // 4
                await node.load(stage_of(served, 0, 8))
                assert node.progress.present_bytes == whole
            assert served.sent_bytes - sent < whole - SMALL // 4
