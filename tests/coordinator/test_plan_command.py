"""`coordinator plan`: table, JSON, picture and refusals, for clusters on paper."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from coordinator.commands.plan import command
from coordinator.commands.plan_tables import prediction_lines
from coordinator.model_cost import ModelCost
from coordinator.plan_svg import plan_svg
from coordinator.planner.plan import PlanResult
from coordinator.planner.planner import plan_placement
from coordinator.planner.profiles import (
    ClusterProfile,
    Constraints,
    LinkProfile,
    NodeProfile,
    Workload,
)
from tests.support.checkpoints import write_tiny_checkpoint

SVG = "{http://www.w3.org/2000/svg}"
CLUSTER = """
[[nodes]]
id = "big"
memory = "1GiB"
stream_gb_per_second = 20
tflops = 0.4

[[nodes]]
id = "small"
count = 2
memory = "2MiB"
stream_gb_per_second = 5
tflops = 0.1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("plan") / "tiny", num_layers=4)


@pytest.fixture
def plan(tmp_path: Path, model: Path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)

    def run(*options: str) -> Result:
        arguments = ["--model", str(model), "--nodes", str(path), *options]
        return CliRunner(env={"COLUMNS": "220"}).invoke(command, arguments)

    return run


def test_weights_in_few_bits_take_less(plan) -> None:
    shown = [json.loads(plan("--json", "--quantize", mode).stdout) for mode in ("none", "int4")]
    sizes = [
        sum(r["memory"]["weights"] for s in p["replicas"][0]["stages"] for r in s["ranks"])
        for p in shown
    ]
    assert [p["quantize"] for p in shown] == ["none", "int4"]
    assert sizes[1] < sizes[0] / 2.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ""),
        (("--compile",), "predicted for stages that are not compiled"),
        (("--quantize", "int8"), "at the rate measured of whole ones"),
    ],
)
def test_a_prediction_says_what_it_leaves_out(plan, options, words) -> None:
    basis = json.loads(plan("--json", *options).stdout)["prediction"]["basis"]
    assert (words in basis) if words else not basis
    assert (basis in plan(*options).output.replace("\n", " ")) or not words
    assert words or "predicted for" not in plan().output


def test_the_table_names_stages_memory_and_limits(plan) -> None:
    done = plan()
    assert done.exit_code == 0, done.output
    for words in (
        "4 layers, float32, 4 x 128 tokens, for latency",
        "0-3 (4)",
        "big",
        "KV groups",
        "predicted: ",
        "limited by stage 0 on big",
        "slowest link: link coordinator -> big",
        "no better plan exists",
        "not used: small-1: would make it slower",
    ):
        assert words in done.output


def test_json_has_everything(plan) -> None:
    done = plan("--json", "--stages", "2", "--context", "64", "--concurrency", "2")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    (replica,) = answer["replicas"]
    assert len(replica["stages"]) == 2
    assert len(replica["link_seconds"]) == 3
    assert replica["stages"][-1]["end_layer"] == 4
    rank = replica["stages"][0]["ranks"][0]
    assert rank["memory"]["total"] == sum(
        rank["memory"][kind]
        for kind in ("weights", "embedding_head", "kv", "activations", "overhead")
    )
    assert rank["memory"]["total"] <= rank["memory_limit_bytes"]
    assert answer["max_context_tokens"] == 64
    assert answer["is_exact"]
    assert len(answer["unused"]) == 1
    expected = answer["prediction"]
    one_stream = replica["stages"][0]["seconds"] + replica["stages"][1]["seconds"]
    assert expected["time_per_token_seconds"] == pytest.approx(
        one_stream + sum(replica["link_seconds"])
    )


def test_wishes(plan) -> None:
    pinned = json.loads(plan("--json", "--pin", "small-1=0:1", "--pin", "big=1:4").output)
    shown = [
        (s["ranks"][0]["node_id"], s["start_layer"], s["end_layer"])
        for s in pinned["replicas"][0]["stages"]
    ]
    assert shown == [("small-1", 0, 1), ("big", 1, 4)]
    excluded = json.loads(
        plan("--json", "--exclude", "big", "--context", "32", "--concurrency", "1").output
    )
    assert excluded["unused"]["big"] == "excluded by the user"
    ranks = plan("--json", "--max-tp", "2", "--pin", "small-1=0:4", "--pin", "small-2=0:4",
                 "--context", "32", "--concurrency", "1")  # fmt: skip
    (stage,) = json.loads(ranks.output)["replicas"][0]["stages"]
    assert sum(rank["kv_groups"] for rank in stage["ranks"]) == 2
    busy = json.loads(plan("--json", "--objective", "throughput", "--concurrency", "8").output)
    assert busy["objective"] == "throughput"


def test_a_refusal_says_who_lacks_what_and_what_would_fit(plan) -> None:
    done = plan("--context", "128", "--concurrency", "100000")
    assert done.exit_code == 1
    assert re.search(r"big: layers .* lacks .* \(\d+ bytes\)", done.output)
    advised = re.search(r"would fit: (\d+) stream\(s\) of 128 tokens", done.output)
    assert advised is not None
    assert plan("--context", "128", "--concurrency", advised[1]).exit_code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pin", "big"), "--pin takes NODE=START:END"),
        (("--pin", "big=2:9"), "the model has 4"),
        (("--exclude", "nobody"), "nodes that are not in the cluster: nobody"),
        (("--stages", "5"), "5 stages were asked for, but the model has 4 layers"),
        (("--svg", "/nowhere/at/all.svg"), "cannot write /nowhere/at/all.svg"),
        (("--prompt-tokens", "0"), "prompt_tokens must be at least 1"),
    ],
)
def test_mistakes_are_one_line(plan, options, words) -> None:
    done = plan(*options)
    assert done.exit_code == 1
    assert words in done.output
    assert "Traceback" not in done.output


def test_without_a_coordinator_there_are_no_live_nodes(model: Path) -> None:
    arguments = ["--model", str(model), "--coordinator", "127.0.0.1:1"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 1
    assert "127.0.0.1:1 could not be reached" in done.output


def test_the_picture_is_written(plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    assert plan("--svg", str(path), "--stages", "2").exit_code == 0
    root = ElementTree.fromstring(path.read_text())
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"stage 0", "stage 1", "coordinator", "KV cache"} <= set(words)


def planned(
    num_nodes: int, *, names: str = "node", tp: int = 1, replicas: int = 1, slow_link: bool = False
) -> tuple[PlanResult, Workload]:
    layers = 16
    model = ModelCost(
        num_layers=layers, layer_bytes=(2**26,) * layers, embedding_bytes=2**24,
        head_bytes=2**24, norm_bytes=2**12, tied=False, kv_bytes_per_token_layer=4096,
        dtype="bfloat16", attention_bytes=(2**24,) * layers, mlp_bytes=(2**25,) * layers,
        hidden_size=1024, num_heads=16, kv_groups=8, head_dim=64, mlp_columns=4096,
    )  # fmt: skip
    nodes = tuple(
        NodeProfile(
            node_id=f"{names}-{i}", memory_bytes=2**31, process_overhead_bytes=2**28,
            stream_bytes_per_second={"bfloat16": 1e10}, flops_per_second={"bfloat16": 1e12},
        )
        for i in range(num_nodes)
    )  # fmt: skip
    seconds = 0.5 if slow_link else 1e-5
    cluster = ClusterProfile(
        nodes=nodes,
        default_link=LinkProfile(latency_seconds=seconds, bytes_per_second=1e10),
    )
    workload = Workload(max_context_tokens=512, concurrency=8, objective="throughput")
    if slow_link:
        workload = Workload(max_context_tokens=512)
    stages = num_nodes // tp // replicas
    result = plan_placement(
        model,
        cluster=cluster,
        workload=workload,
        constraints=Constraints(
            num_stages=stages, max_tp_degree=tp, max_replicas=replicas,
            is_order_fixed=num_nodes > 5,
        ),
    )  # fmt: skip
    return result, workload


@pytest.mark.parametrize(
    ("num_nodes", "options"),
    [
        (1, {}),
        (2, {"slow_link": True}),
        (4, {"tp": 4}),
        (4, {"replicas": 2}),
        (16, {}),
        (3, {"names": "<b>&\"'" + 60 * "long"}),
    ],
)
def test_everything_is_inside_the_picture(num_nodes: int, options) -> None:
    result, workload = planned(num_nodes, **options)
    root = ElementTree.fromstring(plan_svg("<model> & co", result, workload))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    boxes = [
        [float(rect.get(key, 0)) for key in ("x", "y", "width", "height")]
        for rect in root.iter(f"{SVG}rect")
    ]
    assert all(x + w <= width and y + h <= height for x, y, w, h in boxes)
    for text in root.iter(f"{SVG}text"):
        x, room = float(text.get("x", 0)), {"start": 1.0, "middle": 0.5, "end": 0.0}
        # A generous estimate of a letter's width: a little over half of its height.
        wide = len(text.text or "") * float(text.get("font-size", 0)) * 0.6
        assert x + wide * room[text.get("text-anchor", "start")] <= width + 40, text.text
        assert 0 < float(text.get("y", 0)) < height
    stages = sum(replica.num_stages for replica in result.plan.replicas)
    cards = [rect for rect in root.iter(f"{SVG}rect") if rect.get("rx") == "8"]
    assert len(cards) == stages


def test_what_limits_is_red_and_nothing_else_is() -> None:
    def red(svg: str) -> tuple[int, int]:
        root = ElementTree.fromstring(svg)
        cards = [r for r in root.iter(f"{SVG}rect") if r.get("stroke") == "#c62828"]
        links = [p for p in root.iter(f"{SVG}path") if p.get("stroke") == "#c62828"]
        return len(cards), len(links)

    assert red(plan_svg("m", *planned(2))) == (1, 0)
    slow, workload = planned(2, slow_link=True)
    assert slow.prediction.limiting.startswith("link")
    assert red(plan_svg("m", slow, workload)) == (0, 1)
    assert any("link" in line for line in prediction_lines(slow, workload))


def test_nodes_share_stages_as_asked(plan) -> None:
    found = json.loads(plan("--tp", "2,1", "--context", "64", "--json").stdout)
    stages = found["replicas"][0]["stages"]
    assert [len(stage["ranks"]) for stage in stages] == [2, 1]
    assert sum(rank["query_heads"] for rank in stages[0]["ranks"]) == 4
    assert "KV groups" in plan("--tp", "2,1", "--context", "64").stdout
    # Negative control: left to the planner, the fast node is alone.
    alone = json.loads(plan("--context", "64", "--json").stdout)
    assert [len(stage["ranks"]) for stage in alone["replicas"][0]["stages"]] == [1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--tp", "two"), "--tp takes a number"),
        (("--tp", "2,1", "--stages", "3"), "tp names the ranks of 2 stages"),
        (("--tp", "5", "--stages", "1"), "need 5 nodes"),
        (("--tp", "0"), "at least 1"),
    ],
)
def test_degrees_that_cannot_be_are_refused(plan, options: tuple[str, ...], text: str) -> None:
    result = plan(*options)
    assert result.exit_code != 0
    assert text in result.output
