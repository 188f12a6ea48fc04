"""Options that several commands share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from coordinator.config import DeploymentConfig
from coordinator.models import locate_model
from stagemesh.cli_support import Bytes
from stagemesh.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

SAMPLE_MODEL = "smollm2-135m-instruct"


def _apply(function: F, options: list[Callable[[Any], Any]]) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def model_options(function: F) -> F:
    """Add what a deployment is asked for."""
    return _apply(
        function,
        [
            click.option(
                "--model",
                default=SAMPLE_MODEL,
                show_default=True,
                help="A folder, a .gguf file, a known name, or org/name[@revision][:file.gguf] "
                "of the Hugging Face hub.",
            ),
            click.option("--name", help="What clients call the model."),
            click.option(
                "--dtype",
                type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
                default="auto",
                show_default=True,
            ),
            click.option(
                "--quantize",
                type=click.Choice(["none", "auto", "int8", "int4"]),
                default="none",
                show_default=True,
                help="Hold weights in 8 or 4 bits; auto keeps what a GGUF file has in them.",
            ),
            click.option(
                "--compile",
                is_flag=True,
                help="Compile each stage while it serves; needs a C++ compiler on the nodes, once.",
            ),
            click.option("--context", "max_context", type=int, help="Longest sequence in tokens."),
            click.option("--concurrency", type=int, help="Full-length sequences at once."),
            click.option("--stages", type=int, help="Number of pipeline stages."),
            click.option(
                "--tp",
                metavar="N[,N...]",
                help="Nodes that share each stage as tensor-parallel ranks: one number for all "
                "stages, or one for each, e.g. 2,1.",
            ),
            click.option(
                "--tp-backend",
                type=click.Choice(["grpc", "gloo"]),
                default="grpc",
                show_default=True,
                help="What carries the tensors of nodes that share a stage.",
            ),
        ],
    )


def placement_options(*, objective: str | None) -> Callable[[F], F]:
    """Add what is wanted of the placement.

    Args:
        objective: the default; None places by memory, with layers for every node.
    """
    by_default = "every node gets layers, by its memory" if objective is None else objective
    return lambda function: _apply(
        function,
        [
            click.option(
                "--objective",
                type=click.Choice(["latency", "throughput"]),
                default=objective,
                help=f"What the planner makes good, by measured speeds. By default: {by_default}.",
            ),
            click.option("--max-stages", type=int, help="No more pipeline stages than these."),
            click.option(
                "--max-tp",
                type=int,
                default=1,
                show_default=True,
                help="Nodes that the planner may let share a stage; above 1 it places.",
            ),
            click.option(
                "--pin",
                "pins",
                multiple=True,
                metavar="NODE=START:END",
                help="Layers [START, END) for a node, e.g. a=0:12; repeatable.",
            ),
            click.option("--exclude", multiple=True, metavar="NODE", help="Leave a node alone."),
            click.option(
                "--prompt-tokens",
                type=int,
                default=128,
                show_default=True,
                help="A typical prompt, for the predicted time to first token.",
            ),
        ],
    )


def parse_pins(pins: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Pinned layers by node.

    Raises:
        ConfigError: one is not NODE=START:END.
    """
    result = {}
    for pin in pins:
        node, _, layers = pin.rpartition("=")
        start, _, end = layers.partition(":")
        if not node or not (start.isdigit() and end.isdigit()):
            raise ConfigError(f"--pin takes NODE=START:END such as a=0:12, got {pin!r}")
        result[node] = (int(start), int(end))
    return result


def parse_degrees(text: str | None) -> tuple[int, ...]:
    """Ranks of each stage.

    Raises:
        ConfigError: it is no list of numbers.
    """
    if text is None:
        return ()
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdigit() for number in numbers):
        raise ConfigError(f"--tp takes a number, or one for each stage such as 2,1, got {text!r}")
    return tuple(int(number) for number in numbers)


def local_options(function: F) -> F:
    """Add what a local cluster's nodes are started with."""
    return _apply(
        function,
        [
            click.option("--threads", type=int, help="CPU threads of each local node."),
            click.option("--memory", type=Bytes(), help="Memory of each local node, e.g. 4GiB."),
            click.option("--device", default="auto", help="Device of each local node."),
        ],
    )


def json_option(function: F) -> F:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(
        function
    )


def deployment_config(
    *,
    model: str,
    name: str | None,
    dtype: str,
    quantize: str,
    compile: bool,
    max_context: int | None,
    concurrency: int | None,
    stages: int | None,
    tp: str | None = None,
    tp_backend: str = "grpc",
    max_tp: int = 1,
    objective: str | None = None,
    max_stages: int | None = None,
    pins: Sequence[str] = (),
    exclude: Sequence[str] = (),
    prompt_tokens: int = 128,
    min_nodes: int | None = None,
) -> DeploymentConfig:
    """The deployment that `model_options` and `placement_options` ask for.

    A model that only the hub has is downloaded.

    Raises:
        ConfigError: a value is not allowed.
        ModelNotFound: the model is nowhere.
        UnsupportedModel: the hub has it in no format that is read.
    """
    config = DeploymentConfig(
        model=model,
        name=name,
        dtype=dtype,  # type: ignore[arg-type]  # click has checked the choice
        quantize=quantize,  # type: ignore[arg-type]  # likewise
        compile=compile,
        max_context_tokens=max_context,
        concurrency=concurrency,
        num_stages=stages,
        tp=parse_degrees(tp),
        max_tp=max_tp,
        tp_backend=tp_backend,  # type: ignore[arg-type]  # likewise
        max_stages=max_stages,
        objective=objective,  # type: ignore[arg-type]  # likewise
        pinned=parse_pins(pins),
        excluded=frozenset(exclude),
        prompt_tokens=prompt_tokens,
        min_nodes=min_nodes,
    )
    return locate_model(config, console=Console(stderr=True))


def read_api_keys(path: Path | None) -> frozenset[str]:
    """API keys from a file, one a line.

    Raises:
        ConfigError: the file is not readable or has none.
    """
    if path is None:
        return frozenset()
    try:
        keys = frozenset(line.strip() for line in path.read_text().splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read the API key file {path}: {error.strerror}") from error
    if not keys:
        raise ConfigError(f"the API key file {path} has no key")
    return keys
