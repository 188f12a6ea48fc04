"""cluster.toml: what it may say, and what is said about mistakes."""

import re
from pathlib import Path

import pytest

from coordinator.cluster_file import read_cluster_file
from coordinator.measurements import UNKNOWN_LINK
from coordinator.planner.profiles import COORDINATOR
from stagemesh.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NODE = '[[nodes]]\nid = "a"\nmemory = "1GiB"\nstream_gb_per_second = 10\ntflops = 0.1\n'


def read(folder: Path, text: str):
    path = folder / "cluster.toml"
    path.write_text(text)
    return read_cluster_file(path)


def test_the_documented_example(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "placement.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    cluster = read(tmp_path, example)
    assert len(cluster.nodes) >= 4
    assert cluster.links


def test_a_node_and_its_defaults(tmp_path: Path) -> None:
    cluster = read(tmp_path, NODE)
    (node,) = cluster.nodes
    assert node.memory_bytes - node.process_overhead_bytes == 2**30
    assert node.process_overhead_bytes == 2**29
    assert node.stream_bytes_per_second == {"float32": 1e10, "bfloat16": 1e10, "float16": 1e10}
    assert node.flops_per_second["float32"] == 1e11
    assert node.layer_overhead_seconds == pytest.approx(2e-4)
    assert cluster.default_link == UNKNOWN_LINK


def test_rates_by_dtype_counts_and_links(tmp_path: Path) -> None:
    text = (
        "[link]\nlatency_ms = 0.5\ngbit_per_second = 1\nsum_us = 80\nsum_slowdown = 1.5\n"
        + NODE.replace("= 10", "= { bfloat16 = 20 }").replace('"a"', '"a"\ncount = 2')
        + '[[links]]\nbetween = ["a-1", "a-2"]\nlatency_ms = 0.1\ngbit_per_second = 8\n'
        + '[[links]]\nbetween = ["coordinator", "a-1"]\nlatency_ms = 1\ngbit_per_second = 8\n'
    )
    cluster = read(tmp_path, text)
    assert [node.node_id for node in cluster.nodes] == ["a-1", "a-2"]
    assert cluster.nodes[0].stream_bytes_per_second == {"bfloat16": 2e10}
    assert cluster.link("a-2", "a-1").bytes_per_second == 1e9
    assert cluster.link("a-2", COORDINATOR).latency_seconds == pytest.approx(5e-4)
    assert cluster.link(COORDINATOR, "a-1").latency_seconds == pytest.approx(1e-3)
    assert cluster.default_link.sum_latency == pytest.approx(80e-6)
    assert cluster.link("a-1", "a-2").sum_latency == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no [[nodes]]"),
        ("nodes = 3", "write [[nodes]]"),
        ("[[nodes", "no TOML"),
        (NODE + "speed = 1\n", "nodes[0]: unknown key speed; allowed: count"),
        (NODE.replace('"1GiB"', '"1 house"'), "nodes[0]: memory: not a size: '1 house'"),
        (NODE.replace("memory", "#"), "nodes[0]: memory must be a size"),
        (NODE.replace("= 10", "= true"), "stream_gb_per_second must be a number"),
        (NODE.replace("= 10", "= -1"), "stream_gb_per_second must be a number of 0 or more"),
        (NODE.replace("= 10", "= nan"), "stream_gb_per_second must be a number of 0 or more"),
        (NODE.replace("= 10", "= { int4 = 1 }"), "by dtype (float32, bfloat16, float16)"),
        (NODE.replace('"a"', '""'), "nodes[0]: id must be a name"),
        (NODE + "count = 0\n", "count must be in"),
        (NODE + NODE, "more than once: a"),
        (NODE + '[[links]]\nbetween = ["a", "z"]\n', "links[0]: between must be two node ids"),
        (NODE + "[link]\nlatency_ms = 1\n", "link: gbit_per_second must be a number"),
        (NODE + "[link]\nlatency_ms = 1\ngbit_per_second = 0\n", "bytes_per_second above 0"),
        (
            NODE + "[link]\nlatency_ms = 1\ngbit_per_second = 1\nsum_us = -1\n",
            "link: sum_us must be a number of 0 or more",
        ),
        ("colour = 1\n" + NODE, "the file: unknown key colour"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read(tmp_path, text)
    assert "cluster.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_cluster_file(tmp_path / "none.toml")
