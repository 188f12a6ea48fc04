"""cluster.toml: nodes and links on paper, to plan for machines that are not there.

[link]                       # any link that is not named below
latency_ms = 0.2
gbit_per_second = 1

[[nodes]]
id = "big"
memory = "24GiB"
stream_gb_per_second = 20                      # one figure, or by dtype:
tflops = { float32 = 0.2, bfloat16 = 0.4 }

[[links]]
between = ["big", "small-1"]
latency_ms = 0.05
gbit_per_second = 10
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.measurements import UNKNOWN_LINK
from coordinator.planner.profiles import COORDINATOR, ClusterProfile, LinkProfile, NodeProfile
from stagemesh.cli_support import parse_bytes
from stagemesh.errors import ConfigError
from stagemesh.model_spec import ELEMENT_BYTES

_NODE_KEYS = frozenset(
    {
        "id",
        "count",
        "memory",
        "process_overhead",
        "stream_gb_per_second",
        "tflops",
        "layer_overhead_us",
        "step_overhead_us",
        "threads",
        "device",
    }
)
_LINK_KEYS = frozenset({"latency_ms", "gbit_per_second", "sum_us", "sum_slowdown"})
_MAX_NODES = 100_000
_DEFAULT_LAYER_OVERHEAD_US = 200
_DEFAULT_STEP_OVERHEAD_US = 500
_DEFAULT_PROCESS_OVERHEAD = "0.5GiB"


def read_cluster_file(path: Path) -> ClusterProfile:
    """Read a cluster file.

    Raises:
        ConfigError: it cannot be read; the text names the place and what is expected there.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the cluster file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the cluster file {path} is no TOML: {error}") from error
    try:
        return _cluster(content)
    except ConfigError as error:
        raise ConfigError(f"cluster file {path}: {error}") from error


def _cluster(content: Mapping[str, Any]) -> ClusterProfile:
    _check_keys("the file", content, frozenset({"link", "nodes", "links"}))
    tables = _tables(content, "nodes")
    if not tables:
        raise ConfigError("there are no [[nodes]]")
    nodes = [node for index, table in enumerate(tables) for node in _nodes(table, index)]
    if len(nodes) > _MAX_NODES:
        raise ConfigError(f"at most {_MAX_NODES} nodes, got {len(nodes)}")
    known = {node.node_id for node in nodes} | {COORDINATOR}
    links: dict[tuple[str, str], LinkProfile] = {}
    for index, table in enumerate(_tables(content, "links")):
        where = f"links[{index}]"
        ends = table.get("between")
        if not isinstance(ends, list) or len(ends) != 2 or not set(ends) <= known:
            raise ConfigError(
                f"{where}: between must be two node ids (or {COORDINATOR!r}), got {ends!r}"
            )
        rest = {key: value for key, value in table.items() if key != "between"}
        links[ends[0], ends[1]] = _link(rest, where)
    default = content.get("link")
    return ClusterProfile(
        nodes=tuple(nodes),
        links=links,
        default_link=UNKNOWN_LINK if default is None else _link(default, "link"),
    )


def _nodes(table: Mapping[str, Any], index: int) -> list[NodeProfile]:
    where = f"nodes[{index}]"
    _check_keys(where, table, _NODE_KEYS)
    name = table.get("id")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: id must be a name, got {name!r}")
    count = table.get("count")
    if count is not None and (not isinstance(count, int) or not 1 <= count <= _MAX_NODES):
        raise ConfigError(f"{where}: count must be in [1, {_MAX_NODES}], got {count!r}")
    names = [name] if count is None else [f"{name}-{i}" for i in range(1, count + 1)]
    streams = _rates(table, "stream_gb_per_second", where, unit=1e9)
    flops = _rates(table, "tflops", where, unit=1e12)
    process = _size(table, "process_overhead", where, default=_DEFAULT_PROCESS_OVERHEAD)
    memory = _size(table, "memory", where, default=None)
    layer = _number(table, "layer_overhead_us", where, default=_DEFAULT_LAYER_OVERHEAD_US)
    step = _number(table, "step_overhead_us", where, default=_DEFAULT_STEP_OVERHEAD_US)
    return [
        NodeProfile(
            node_id=each,
            # As in a running cluster: what is offered is for the model, the process on top.
            memory_bytes=memory + process,
            process_overhead_bytes=process,
            stream_bytes_per_second=streams,
            flops_per_second=flops,
            layer_overhead_seconds=layer * 1e-6,
            step_overhead_seconds=step * 1e-6,
            num_threads=int(_number(table, "threads", where, default=1)),
            device=str(table.get("device", "cpu")),
        )
        for each in names
    ]


def _rates(table: Mapping[str, Any], key: str, where: str, *, unit: float) -> dict[str, float]:
    value = table.get(key)
    if not isinstance(value, dict):
        rate = _number(table, key, where, default=None) * unit
        return dict.fromkeys(ELEMENT_BYTES, rate)
    unknown = sorted(set(value) - set(ELEMENT_BYTES))
    if unknown or not value:
        raise ConfigError(
            f"{where}: {key} is by dtype ({', '.join(ELEMENT_BYTES)}), got {unknown or 'none'}"
        )
    return {dtype: _number(value, dtype, f"{where}.{key}", default=None) * unit for dtype in value}


def _link(table: Any, where: str) -> LinkProfile:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table")
    _check_keys(where, table, _LINK_KEYS)
    return LinkProfile(
        latency_seconds=_number(table, "latency_ms", where, default=None) * 1e-3,
        bytes_per_second=_number(table, "gbit_per_second", where, default=None) * 1e9 / 8,
        sum_seconds=_number(table, "sum_us", where, default=None) * 1e-6
        if "sum_us" in table
        else None,
        sum_slowdown=_number(table, "sum_slowdown", where, default=1),
    )


def _number(table: Mapping[str, Any], key: str, where: str, *, default: float | None) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ConfigError(f"{where}: {key} must be a number of 0 or more, got {value!r}")
    return float(value)


def _size(table: Mapping[str, Any], key: str, where: str, *, default: str | None) -> int:
    value = table.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        raise ConfigError(f'{where}: {key} must be a size such as "16GiB", got {value!r}')
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {key}: {error}") from error


def _tables(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    tables = content.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{key} must be tables: write [[{key}]]")
    return tables


def _check_keys(where: str, table: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {', '.join(unknown)}; allowed: {', '.join(sorted(known))}"
        )
