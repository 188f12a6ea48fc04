"""Fetching over real gRPC: every byte once, from where it broke, from whoever has it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
import torch

from stagemesh.checkpoint.weight_part import WeightBlock, WeightPart
from stagemesh.errors import (
    CapacityExceeded,
    CheckpointError,
    ModelNotFound,
    NotReady,
    PeerLost,
    ProtocolError,
)
from stagemesh.models.weights import WeightReader
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.v1 import weights_pb2, weights_pb2_grpc
from stagemesh.weight_transfer.blobs import Blob
from stagemesh.weight_transfer.content_hash import HashBook
from stagemesh.weight_transfer.service import TransferLimits
from tests.cluster.asking import until
from tests.support.checkpoints import write_tiny_checkpoint, write_tiny_gguf
from tests.support.weight_parts import data_of
from tests.weights.serving import (
    FAST,
    SMALL_CHUNKS,
    Served,
    fetching_node,
    serve_model,
    serve_store,
    stage_of,
)


def same_weights(found, expected, start: int, end: int) -> bool:  # type: ignore[no-untyped-def]
    ours, theirs = WeightReader(found), WeightReader(expected)
    pairs = zip(
        found.tensors_for_stage(start, end), expected.tensors_for_stage(start, end), strict=True
    )
    return all(
        torch.equal(ours.read(a, torch.float32), theirs.read(b, torch.float32)) for a, b in pairs
    )


@pytest.mark.parametrize("write", [write_tiny_checkpoint, write_tiny_gguf])
async def test_each_byte_of_the_stages_is_sent_once(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    async with serve_model(write(tmp_path / "m")) as served:
        for start, end, cache in ((0, 2, "a"), (2, 4, "b")):
            before = served.sent_bytes
            with fetching_node(tmp_path / cache, coordinator=served.address) as node:
                spec = await node.load(stage_of(served, start, end))
                assert same_weights(spec, served.spec, start, end)
                assert served.sent_bytes - before == served.stage_bytes(start, end)
                assert node.progress.total_bytes == node.progress.present_bytes
            with fetching_node(tmp_path / cache, coordinator=served.address) as node:
                await node.load(stage_of(served, start, end))
            assert served.sent_bytes - before == served.stage_bytes(start, end)
            with pytest.raises(CheckpointError):  # negative control: the other stage is not here
                same_weights(spec, served.spec, 0, 4)


async def test_a_broken_transfer_goes_on_where_it_broke(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "m")
    slow = replace(FAST, num_streams=1)
    async with serve_model(model) as served:
        whole = served.stage_bytes(0, 4)
        with fetching_node(tmp_path / "c", coordinator=served.address, limits=slow) as node:
            loading = asyncio.create_task(node.load(stage_of(served, 0, 4)))
            await until(lambda: node.progress.present_bytes > whole // 2)
            await served.server.stop(0)
            loading.cancel()
            await asyncio.wait({loading})
    # Of the disk: a chunk may be written while the load is cancelled, and then nobody counts it.
    files = [p for p in (tmp_path / "c").rglob("*") if p.is_file() and len(p.name) == 64]
    got = sum(path.stat().st_size for path in files)
    assert whole // 2 < got < whole
    async with serve_model(model) as served:
        with fetching_node(tmp_path / "c", coordinator=served.address) as node:
            spec = await node.load(stage_of(served, 0, 4))
            assert same_weights(spec, served.spec, 0, 4)
        assert served.sent_bytes == whole - got


async def test_peers_that_have_them_are_asked_first(tmp_path: Path) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        with fetching_node(tmp_path / "a", coordinator=served.address) as first:
            await first.load(stage_of(served, 0, 3))
        before = served.sent_bytes
        async with serve_store(first.cache) as peer:
            peers = (("gone", "127.0.0.1:1"), ("a", peer.address))
            with fetching_node(tmp_path / "b", coordinator=served.address, node_id="b") as second:
                spec = await second.load(stage_of(served, 1, 4, peers=peers))
                assert same_weights(spec, served.spec, 1, 4)
                received = dict(second.progress.received)
        shared = sum(i.num_bytes for layer in served.spec.groups.layers[1:3] for i in layer)
        assert received == {"a": shared, "coordinator": served.sent_bytes - before}
        assert peer.sent_bytes == shared


@pytest.mark.parametrize("is_shared", [True, False])
async def test_nodes_that_share_a_stage_take_halves_from_each_other(
    tmp_path: Path, *, is_shared: bool
) -> None:
    """The negative control: nodes that do not know of each other's stage get all of it each."""
    limits = replace(FAST, batch_tensors=2, num_streams=1)
    async with (
        serve_model(write_tiny_checkpoint(tmp_path / "m")) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        nodes = {
            name: stack.enter_context(
                fetching_node(
                    tmp_path / name, coordinator=served.address, node_id=name, limits=limits
                )
            )
            for name in ("a", "b")
        }
        services = {
            name: await stack.enter_async_context(serve_store(node.cache))
            for name, node in nodes.items()
        }
        peers = tuple((name, service.address) for name, service in services.items())
        wanted = stage_of(served, 0, 4, peers=peers, ranks=("a", "b") if is_shared else ())
        specs = await asyncio.gather(*(node.load(wanted) for node in nodes.values()))
        assert all(same_weights(spec, served.spec, 0, 4) for spec in specs)
        whole = served.stage_bytes(0, 4)
        assert all(node.progress.received.total() == whole for node in nodes.values())
        # They meet in the middle, where both may have begun with the same tensors.
        assert served.sent_bytes < 1.5 * whole if is_shared else served.sent_bytes == 2 * whole


async def test_parts_of_tensors_are_all_that_is_sent(tmp_path: Path) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        parts = some_parts(served)
        size = parts_bytes(served, parts)
        assert size < 0.6 * served.stage_bytes(0, 4)
        with fetching_node(tmp_path / "c", coordinator=served.address) as node:
            spec = await node.load(stage_of(served, 0, 4), parts)
            assert served.sent_bytes == node.progress.total_bytes == size
            for name, part in parts.items():
                found = spec.tensors[name]
                assert found.part == part
                assert found.file.read_bytes() == data_of(served.spec.tensors[name], part)
            await node.load(stage_of(served, 0, 4), parts)
            assert served.sent_bytes == size
            # Negative control: other parts are not there.
            await node.load(stage_of(served, 0, 4), some_parts(served, first_row=1))
            assert served.sent_bytes > 1.5 * size


async def test_parts_go_on_where_they_broke_and_come_from_peers(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "m")
    slow = replace(FAST, num_streams=1)
    async with serve_model(model) as served:
        parts = some_parts(served)
        size = parts_bytes(served, parts)
        with fetching_node(tmp_path / "c", coordinator=served.address, limits=slow) as node:
            loading = asyncio.create_task(node.load(stage_of(served, 0, 4), parts))
            await until(lambda: node.progress.present_bytes > size // 2)
            loading.cancel()
            await asyncio.wait({loading})
    files = [p for p in (tmp_path / "c").rglob("*") if p.is_file() and len(p.name) == 64]
    got = sum(path.stat().st_size for path in files)
    assert size // 2 < got < size
    async with serve_model(model) as served:
        with fetching_node(tmp_path / "c", coordinator=served.address) as node:
            await node.load(stage_of(served, 0, 4), parts)
        assert served.sent_bytes == size - got
        async with serve_store(node.cache) as peer:
            peers = (("a", peer.address),)
            with fetching_node(tmp_path / "b", coordinator=served.address, node_id="b") as second:
                spec = await second.load(stage_of(served, 0, 4, peers=peers), parts)
                assert second.progress.received == {"a": size}
        name, part = next((n, p) for n, p in parts.items() if p is not None)
        assert spec.tensors[name].file.read_bytes() == data_of(served.spec.tensors[name], part)


async def test_who_has_the_whole_tensors_is_sent_no_parts_of_them(tmp_path: Path) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        parts = some_parts(served)
        with fetching_node(tmp_path / "c", coordinator=served.address) as node:
            await node.load(stage_of(served, 0, 2))
            before = served.sent_bytes
            spec = await node.load(stage_of(served, 0, 4), parts)
            there = {info.name for info in served.spec.tensors_for_stage(0, 2)}
            rest = {name: part for name, part in parts.items() if name not in there}
            assert served.sent_bytes - before == parts_bytes(served, rest) > 0
            assert {name for name in parts if spec.tensors[name].part != parts[name]} == {
                name for name in parts if name in there and parts[name] is not None
            }


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (weights_pb2.WeightPart(row_bytes=128), "from 1 to"),
        (weights_pb2.WeightPart(blocks=[weights_pb2.WeightBlock(end_row=1, end_byte=1)]), "not of"),
        (
            weights_pb2.WeightPart(
                row_bytes=128, blocks=[weights_pb2.WeightBlock(end_row=2**40, end_byte=128)]
            ),
            "the tensor has",
        ),
    ],
)
async def test_parts_that_a_tensor_does_not_have_are_refused(
    tmp_path: Path, part: weights_pb2.WeightPart, text: str
) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served, client(served) as stub:
        name = served.spec.groups.embedding.name
        request = weights_pb2.HashTensorsRequest(
            version=our_version(),
            fingerprint=served.spec.fingerprint,
            tensors=[weights_pb2.WantedTensor(name=name, part=part)],
        )
        with pytest.raises(grpc.aio.AioRpcError, match=text):
            await stub.HashTensors(request).read()
        request.tensors[0].ClearField("part")
        assert len((await stub.HashTensors(request).read()).hashes) == 1
        request.tensors[0].name = "../../etc/passwd"
        with pytest.raises(grpc.aio.AioRpcError, match="has no tensor"):
            await stub.HashTensors(request).read()


def some_parts(served: Served, *, first_row: int = 0) -> dict[str, WeightPart | None]:
    """Every other tensor: half of its rows, then of others the first half, and some whole."""
    parts: dict[str, WeightPart | None] = {}
    for index, info in enumerate(served.spec.tensors_for_stage(0, 4)):
        if len(info.shape) == 1:
            parts[info.name] = None
            continue
        rows, row_bytes = info.shape[0], info.num_bytes // info.shape[0]
        blocks = [WeightBlock(first_row, rows // 2, 0, row_bytes)]
        if index % 2:
            blocks = [
                WeightBlock(first_row, rows // 2, 4, row_bytes // 2),
                WeightBlock(rows // 2, rows, 0, row_bytes // 4),
            ]
        parts[info.name] = WeightPart(row_bytes, tuple(blocks))
    return parts


def parts_bytes(served: Served, parts: dict[str, WeightPart | None]) -> int:
    tensors = served.spec.tensors
    return sum(replace(tensors[name], part=part).held_bytes for name, part in parts.items())


async def test_a_peer_that_dies_or_lies_is_left_for_the_coordinator(tmp_path: Path) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        with fetching_node(tmp_path / "a", coordinator=served.address) as first:
            await first.load(stage_of(served, 0, 4))
        # The peer's disk goes bad behind its cache's back: the seal is put on again.
        digest = HashBook(None).look_up(served.spec.groups.embedding).content_hash
        victim = first.cache.blob_path(digest)
        mtime = victim.stat().st_mtime_ns
        victim.write_bytes(b"x" * victim.stat().st_size)
        os.utime(victim, ns=(mtime, mtime))
        async with serve_store(first.cache) as peer:
            with fetching_node(tmp_path / "b", coordinator=served.address, node_id="b") as second:
                spec = await second.load(stage_of(served, 0, 4, peers=(("a", peer.address),)))
                assert same_weights(spec, served.spec, 0, 4)
                assert second.progress.received["coordinator"] > 0


class Lying:
    """A coordinator's store that sends other content than its hashes say."""

    def __init__(self, inner, path: Path) -> None:  # type: ignore[no-untyped-def]
        self._inner, self._path = inner, path

    def find(self, content_hash: bytes) -> Blob | None:
        blob = self._inner.find(content_hash)
        return None if blob is None else Blob(path=self._path, offset=0, num_bytes=blob.num_bytes)


async def test_wrong_content_from_the_coordinator_is_named_after_some_attempts(
    tmp_path: Path,
) -> None:
    noise = tmp_path / "noise"
    noise.write_bytes(b"n" * 10**6)
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        served.servicer._store = Lying(served.servicer._store, noise)
        with fetching_node(tmp_path / "c", coordinator=served.address) as node:
            with pytest.raises(CheckpointError, match=r"tensor model\..* came 3 times"):
                await node.load(stage_of(served, 0, 4))
            assert not list((tmp_path / "c" / "blobs").rglob("*.*"))


async def test_a_damaged_blob_is_fetched_again_and_only_it(tmp_path: Path) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        with fetching_node(tmp_path / "c", coordinator=served.address) as node:
            await node.load(stage_of(served, 0, 4))
            before = served.sent_bytes
            digest = HashBook(None).look_up(served.spec.groups.embedding).content_hash
            path = node.cache.blob_path(digest)
            path.write_bytes(b"y" * path.stat().st_size)
            spec = await node.load(stage_of(served, 0, 4))
            assert same_weights(spec, served.spec, 0, 4)
        assert served.sent_bytes - before == served.spec.groups.embedding.num_bytes


async def test_no_room_is_said_before_a_byte_is_sent(tmp_path: Path) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        address = served.address
        with (
            fetching_node(tmp_path / "c", coordinator=address, free_bytes=lambda _: 1000) as node,
            pytest.raises(CapacityExceeded, match=r"needs .* free; free some space"),
        ):
            await node.load(stage_of(served, 0, 4))
        with (
            fetching_node(tmp_path / "c", coordinator=address, limit_bytes=5000) as node,
            pytest.raises(CapacityExceeded, match=r"raise --cache-limit"),
        ):
            await node.load(stage_of(served, 0, 4))
        assert served.sent_bytes == 0


async def test_two_nodes_that_share_a_cache_fetch_once(tmp_path: Path) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        with (
            fetching_node(tmp_path / "c", coordinator=served.address) as first,
            fetching_node(tmp_path / "c", coordinator=served.address, node_id="b") as second,
        ):
            wanted = stage_of(served, 0, 4)
            specs = await asyncio.gather(first.load(wanted), second.load(wanted))
        assert all(same_weights(spec, served.spec, 0, 4) for spec in specs)
        assert served.sent_bytes == served.stage_bytes(0, 4)


async def test_a_cancelled_load_frees_everything(tmp_path: Path) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        with fetching_node(tmp_path / "c", coordinator=served.address) as node:
            loading = asyncio.create_task(node.load(stage_of(served, 0, 4)))
            await until(lambda: node.progress.received_bytes > 0)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            await until(lambda: served.servicer.num_transfers == 0)
            assert list((tmp_path / "c" / "uses").iterdir()) == []
            spec = await node.load(stage_of(served, 0, 4))
            assert same_weights(spec, served.spec, 0, 4)


async def test_local_files_win_only_when_they_are_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_checkpoint(tmp_path / "m")
    other = write_tiny_checkpoint(tmp_path / "other", num_layers=3)
    async with serve_model(model) as served:
        with fetching_node(
            tmp_path / "c", coordinator=served.address, has_local_files=True
        ) as node:
            spec = await node.load(stage_of(served, 0, 4, path=str(model)))
            assert (spec.path, served.sent_bytes) == (model.resolve(), 0)
            spec = await node.load(stage_of(served, 0, 4, path=str(other)))
            assert same_weights(spec, served.spec, 0, 4)
            assert served.sent_bytes == served.stage_bytes(0, 4)
        assert "not those that the coordinator planned with" in caplog.text
        with fetching_node(tmp_path / "c", coordinator="", has_local_files=True) as node:
            with pytest.raises(CheckpointError, match="not those"):
                await node.load(stage_of(served, 0, 4, path=str(other)))
            with pytest.raises(ModelNotFound, match="--local-only"):
                await node.load(stage_of(served, 0, 4))


async def test_nobody_there_ends_in_time(tmp_path: Path) -> None:
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served:
        wanted = stage_of(served, 0, 4)
    with (
        fetching_node(tmp_path / "c", coordinator="127.0.0.1:1") as node,
        pytest.raises(PeerLost, match=r"127\.0\.0\.1:1"),
    ):
        await node.load(wanted)


async def test_a_file_that_changes_under_the_server_is_not_sent(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "m")
    async with serve_model(model) as served, client(served) as stub:
        info = served.spec.groups.embedding
        assert served.servicer._models is not None
        digest = (await served.servicer._models.hash_of(info)).content_hash
        assert await fetch(stub, digest) == info.num_bytes
        with info.file.open("r+b") as file:
            file.write(b"\0")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fetch(stub, digest)
        assert "changed" in str(refused.value.details())


@contextlib.asynccontextmanager
async def client(served: Served) -> "AsyncGenerator[weights_pb2_grpc.WeightServiceAsyncStub, None]":
    async with grpc.aio.insecure_channel(served.address) as channel:
        yield weights_pb2_grpc.WeightServiceStub(channel)


async def fetch(stub, *hashes: bytes, offset: int = 0, pause: float = 0.0) -> int:  # type: ignore[no-untyped-def]
    request = weights_pb2.FetchTensorsRequest(
        version=our_version(),
        node_id="test",
        tensors=[weights_pb2.TensorRange(content_hash=h, offset=offset) for h in hashes],
    )
    count = 0
    async for chunk in stub.FetchTensors(request):
        count += len(chunk.data)
        await asyncio.sleep(pause)
    return count


BAD = {
    "no such hash": (lambda _: [b"\1" * 32], 0, NotReady, "is here"),
    "no hash": (lambda _: [b"../../etc/passwd"], 0, ProtocolError, "32 bytes"),
    "none": (lambda _: [], 0, ProtocolError, "from 1 to"),
    "too many": (lambda good: [good] * 2000, 0, ProtocolError, "from 1 to"),
    "beyond the end": (lambda good: [good], 2**60, ProtocolError, "none at offset"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_requests_are_refused(tmp_path: Path, case: str) -> None:
    hashes, offset, _, text = BAD[case]
    async with serve_model(write_tiny_checkpoint(tmp_path / "m")) as served, client(served) as stub:
        info = served.spec.groups.embedding
        good = (await served.servicer._models.hash_of(info)).content_hash  # type: ignore[union-attr]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fetch(stub, *hashes(good), offset=offset)
        assert text in str(refused.value.details())
        assert await fetch(stub, good) == info.num_bytes
        assert served.servicer.num_transfers == 0


async def test_a_reader_that_takes_nothing_loses_its_stream_and_holds_no_more_than_a_window(
    tmp_path: Path,
) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(48 * 2**20))

    class One:
        def find(self, content_hash: bytes) -> Blob | None:
            return Blob(path=big, offset=0, num_bytes=48 * 2**20)

    limits = TransferLimits(write_seconds=0.5, max_transfers_per_node=1)
    async with serve_store(One(), limits=limits) as served, client(served) as stub:
        request = weights_pb2.FetchTensorsRequest(
            version=our_version(),
            node_id="test",
            tensors=[weights_pb2.TensorRange(content_hash=b"\1" * 32)],
        )
        call = stub.FetchTensors(request)
        await call.read()
        # Nothing more is read: the server stops at what the transport holds.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fetch(stub, b"\1" * 32)  # the only place is taken
        assert "Try again later" in str(refused.value.details())
        await until(lambda: served.servicer.num_transfers == 0)
        assert served.sent_bytes < 32 * 2**20
        call.cancel()
        assert await fetch(stub, b"\1" * 32) == 48 * 2**20  # negative control


async def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    limits = replace(SMALL_CHUNKS, max_transfers=1)
    async with serve_model(write_tiny_checkpoint(tmp_path / "m"), limits=limits) as served:
        with fetching_node(
            tmp_path / "c", coordinator=served.address, limits=replace(FAST, batch_tensors=4)
        ) as node:
            spec = await node.load(stage_of(served, 0, 4))
            assert same_weights(spec, served.spec, 0, 4)
