"""What crosses the network for stages of several ranks: weights and activations, counted."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from node.next_stage import NextStage
from stagemesh.layout import StageAssignment
from stagemesh.model_spec import ModelSpec
from tests.support.cluster import Cluster, start_cluster, tiny_model
from tests.support.stage_chain import reference_tokens

HIDDEN = 48
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": HIDDEN}
PROMPT = [(7 * i) % 250 for i in range(64)]
NUM_TOKENS = 6


def received_bytes(cluster: Cluster) -> dict[str, int]:
    """Weights that came to each node over the network, from whomever."""
    loads = cluster.coordinator.servicer.cluster_status().deployments[0].loads
    return {load.node_id: sum(origin.num_bytes for origin in load.fetch.origins) for load in loads}


def shard_bytes(spec: ModelSpec, stage: StageAssignment, rank: int) -> int:
    """What a rank has of each of a stage's tensors, by their names."""

    def share(name: str) -> Fraction:
        shares, kind = stage.shares, name.split(".")[-2]
        if shares is None or kind.endswith("norm"):
            return Fraction(1)
        if kind in ("q_proj", "o_proj"):
            return Fraction(shares.query_heads[rank], shares.num_heads)
        if kind in ("k_proj", "v_proj"):
            start, end = shares.kv_range(rank)
            return Fraction(end - start, shares.num_kv_heads)
        if kind in ("gate_proj", "up_proj", "down_proj"):
            return Fraction(shares.mlp_columns[rank], sum(shares.mlp_columns))
        assert kind in ("embed_tokens", "lm_head"), name
        return Fraction(shares.vocab_rows[rank], sum(shares.vocab_rows))

    infos = spec.tensors_for_stage(stage.start_layer, stage.end_layer)
    return int(sum(info.num_bytes * share(info.name) for info in infos))


async def test_ranks_without_files_get_their_shards_once_and_keep_them(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, **SIX_HEADS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = reference_tokens(model, PROMPT, NUM_TOKENS)
    for is_first in (True, False):
        async with start_cluster(folder, num_nodes=0, min_nodes=3, tp=(2, 1)) as cluster:
            for index in (1, 2, 3):
                await cluster.add_node(
                    f"node-{index}", has_local_files=False, cache_folder=tmp_path / f"c{index}"
                )
            await cluster.wait_ready()
            assert await cluster.generate(PROMPT, NUM_TOKENS) == expected
            plan, spec = cluster.deployment.plan, cluster.deployment.spec
            assert plan is not None
            assert [len(stage.node_ids) for stage in plan.stages] == [2, 1]
            shards = {
                node_id: shard_bytes(spec, stage, rank)
                for stage in plan.stages
                for rank, node_id in enumerate(stage.node_ids)
            }
            # Negative control: the ranks' shards differ from each other and from the whole stage.
            first = plan.stages[0]
            whole = spec.tensors_for_stage(first.start_layer, first.end_layer)
            sizes = {*shards.values(), sum(info.num_bytes for info in whole)}
            assert len(sizes) == 4
            received = received_bytes(cluster)
            sent = cluster.coordinator.weights.sent_bytes.total()
            if is_first:
                assert received == shards
                # What a node has from another one, the coordinator did not send.
                assert sent <= sum(received.values())
            else:
                assert received == dict.fromkeys(shards, 0)
                assert sent == 0


class CountingCall:
    """A stream of steps that counts what is written to it."""

    def __init__(self, call: Any, counts: list[int]) -> None:
        self._call = call
        self._counts = counts

    async def write(self, frame: Any) -> None:
        self._counts.append(frame.ByteSize())
        await self._call.write(frame)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def count_links(cluster: Cluster) -> dict[tuple[str, str], list[int]]:
    """Bytes of the frames on each link between two nodes from now on."""
    counts: dict[tuple[str, str], list[int]] = {}
    for node_id, node in cluster.nodes.items():
        for deployment in node.daemon.servicer._deployments.values():
            links: list[NextStage] = list(deployment.runner.next_ranks.values())
            for link in links:
                frames = counts.setdefault((node_id, link.node_id), [])
                link._call = CountingCall(link._call, frames)  # type: ignore[assignment]
    return counts


@pytest.mark.parametrize(
    ("degrees", "fed"),
    [
        ((2, 1), {("node-1", "node-3")}),
        ((1, 2), {("node-1", "node-2"), ("node-1", "node-3")}),
        ((2, 3), {("node-1", "node-3"), ("node-2", "node-4"), ("node-1", "node-5")}),
    ],
)
async def test_each_rank_gets_an_activation_once(
    tmp_path: Path, degrees: tuple[int, ...], fed: set[tuple[str, str]]
) -> None:
    folder = tiny_model(tmp_path, **SIX_HEADS)
    async with start_cluster(folder, num_nodes=sum(degrees), tp=degrees) as cluster:
        counts = count_links(cluster)
        assert set(counts) == fed
        await cluster.generate(PROMPT, NUM_TOKENS)
        num_steps = NUM_TOKENS
        activations = (len(PROMPT) + num_steps - 1) * HIDDEN * 4
        for link, frames in counts.items():
            # A step is a header of some 100 bytes beside the activation; releases have none.
            assert activations < sum(frames) < activations + 200 * (num_steps + 2), link


async def test_a_link_more_is_seen(tmp_path: Path) -> None:
    """The negative control: a sender that sends all twice is beyond the bound."""
    folder = tiny_model(tmp_path, **SIX_HEADS)
    async with start_cluster(folder, num_nodes=2, num_stages=2) as cluster:
        frames = count_links(cluster)["node-1", "node-2"]
        await cluster.generate(PROMPT, NUM_TOKENS)
        activations = (len(PROMPT) + NUM_TOKENS - 1) * HIDDEN * 4
        assert 2 * sum(frames) > activations + 200 * (NUM_TOKENS + 2)
