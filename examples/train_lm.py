"""Train a language model over the mesh: a small Llama from scratch, or one that there is.

    python examples/train_lm.py --launch 4 --dp 2 --pp 2 --fsdp
    torchrun --nproc-per-node 2 examples/train_lm.py --tp 2
    python examples/train_lm.py --launch 2 --pp 2 --resume --steps 400
    python examples/train_lm.py --launch 2 --pp 2 --out tuned --model smollm2-135m-instruct

The text is Python's own reference manual. The run's folder gets checkpoints that a coordinator
serves, the history of the losses, and a picture of it. docs/training.md says more.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import click
import torch
from click.core import ParameterSource
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from coordinator.text.gguf_tokenizer import build_gguf_tokenizer
from coordinator.text.metadata import text_metadata
from stagemesh.cli_support import guarded, log_options
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, NotReady
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.topology import Topology
from stagemesh.training.checkpoint_folder import latest_checkpoint, read_state
from stagemesh.training.config import Precision, TrainConfig, check_model
from stagemesh.training.data import split_tokens
from stagemesh.training.history import HistoryEntry
from stagemesh.training.jobs import Job, fine_tune_job, fresh_job, resumed_job, small_llama
from stagemesh.training.launch import (
    MEETING_VARIABLE,
    check_parent,
    describe_failures,
    join_world,
    launch_ranks,
    local_device,
    world_size_of,
)
from stagemesh.training.run import RunConfig, RunResult, run_training

FRESH = "fresh"
HELD_OUT = 0.05

KEPT = MappingProxyType(
    {
        "batch_size": "batch_size",
        "sequence_length": "sequence_length",
        "lr": "learning_rate",
        "warmup": "warmup_steps",
        "steps": "total_steps",
        "precision": "precision",
        "seed": "seed",
    }
)
"""Flags that stay as they were where a run goes on, and how checkpoints call them."""


@click.command()
@click.option("--launch", type=int, help="Start so many ranks on this machine, without torchrun.")
@click.option("--dp", type=int, help="Data-parallel degree; default: the ranks that are left.")
@click.option("--pp", type=int, default=1, show_default=True, help="Pipeline stages.")
@click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel degree.")
@click.option("--fsdp", is_flag=True, help="Share parameters and optimizer state over dp.")
@click.option("--backend", type=click.Choice(["grpc", "gloo"]), default="grpc", show_default=True)
@click.option(
    "--schedule",
    type=click.Choice(["gpipe", "one_f_one_b", "interleaved", "zero_bubble"]),
    default="one_f_one_b",
    show_default=True,
)
@click.option("--microbatches", type=int, help="Of each replica's batch; default: twice pp.")
@click.option("--model", default=FRESH, show_default=True, help="Or a folder, .gguf, known name.")
@click.option("--layers", type=int, default=4, show_default=True, help="Of a fresh model.")
@click.option("--hidden-size", type=int, default=128, show_default=True, help="Of a fresh model.")
@click.option("--heads", type=int, default=4, show_default=True, help="Of a fresh model.")
@click.option("--vocab-size", type=int, default=1024, show_default=True, help="Likewise.")
@click.option("--steps", type=int, default=300, show_default=True, help="Optimizer steps in all.")
@click.option("--batch-size", type=int, default=16, show_default=True, help="Sequences per step.")
@click.option("--sequence-length", type=int, default=128, show_default=True)
@click.option("--lr", type=float, help="Default: 3e-3 for a fresh model, 2e-5 for others.")
@click.option("--warmup", type=int, help="Steps; default: 20, at most a fifth of all.")
@click.option(
    "--precision", type=click.Choice(get_args(Precision)), default="float32", show_default=True
)
@click.option("--recompute", is_flag=True, help="Compute activations twice instead of holding.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--out", "run", type=click.Path(path_type=Path), default=Path("run"), show_default=True
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the run's last checkpoint, if any, as it was trained.",
)
@click.option("--save-every", type=int, default=100, show_default=True, help="Steps.")
@click.option("--keep", type=int, default=2, show_default=True, help="Checkpoints.")
@click.option("--measure-every", type=int, default=25, show_default=True, help="Steps.")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds.")
@click.option("--threads", type=int, help="CPU threads per rank; default: an even share.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--plot/--no-plot", default=True, help="Write loss.png to the run's folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@log_options
@click.pass_context
def main(
    context: click.Context, *, launch: int | None, log_level: str, log_format: str, **flags: Any
) -> None:
    """Train a language model on Python's reference manual."""
    is_child = MEETING_VARIABLE in os.environ

    def start() -> int:
        num_ranks = launch if launch and not is_child else world_size_of(os.environ)
        resumed = latest_checkpoint(flags["run"]) if flags["resume"] else None
        if resumed is not None:
            keep_settings(context, flags, resumed)
        config = train_config(flags, num_ranks)
        if resumed is not None:
            check_model(load_model_spec(resumed).config, config)
        elif flags["model"] == FRESH:
            check_model(fresh_model(flags), config)
        else:
            check_model(load_model_spec(flags["model"]).config, config)
        check_run(flags)
        if launch is not None and not is_child:
            return launch_all(launch, flags)
        return be_rank(flags, config)

    # What groups come and go is of no interest beside a bar.
    guarded(start, log_format=log_format, log_level="warning" if log_level == "info" else log_level)


def keep_settings(context: click.Context, flags: dict[str, Any], checkpoint: Path) -> None:
    """What the command line does not say is as it was when the checkpoint was written."""
    settings = read_state(checkpoint)["settings"]
    for flag, name in KEPT.items():
        if name in settings and context.get_parameter_source(flag) is ParameterSource.DEFAULT:
            flags[flag] = settings[name]


def train_config(flags: dict[str, Any], num_ranks: int) -> TrainConfig:
    """What the flags say, for so many ranks."""
    dp, pp, tp = flags["dp"], flags["pp"], flags["tp"]
    if dp is None:
        dp = max(1, num_ranks // max(1, pp * tp))
    topology = Topology(dp=dp, pp=pp, tp=tp)
    if topology.world_size != num_ranks:
        raise ConfigError(
            f"dp {dp} x pp {pp} x tp {tp} makes {topology.world_size} ranks, there are "
            f"{num_ranks}: start as many with --launch or torchrun, or change the degrees"
        )
    rate, parts, warmup = flags["lr"], flags["microbatches"], flags["warmup"]
    if warmup is None:
        warmup = max(0, min(20, flags["steps"] // 5))
    if rate is None:
        rate = 3e-3 if flags["model"] == FRESH else 2e-5
    if parts is None:
        parts = max(1, min(2 * pp if pp > 1 else 1, flags["batch_size"] // dp))
    return TrainConfig(
        topology=topology,
        fsdp=flags["fsdp"],
        schedule=flags["schedule"],
        num_microbatches=parts,
        batch_size=flags["batch_size"],
        sequence_length=flags["sequence_length"],
        learning_rate=rate,
        warmup_steps=warmup,
        total_steps=flags["steps"],
        precision=flags["precision"],
        checkpoint_activations=flags["recompute"],
        seed=flags["seed"],
    )


def fresh_model(flags: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a new model."""
    return small_llama(
        vocab_size=flags["vocab_size"],
        hidden_size=flags["hidden_size"],
        num_layers=flags["layers"],
        num_heads=flags["heads"],
        context=max(512, flags["sequence_length"]),
    )


def check_run(flags: dict[str, Any]) -> None:
    """A run that is there is not begun anew by accident."""
    found = latest_checkpoint(flags["run"])
    if found is not None and not flags["resume"] and MEETING_VARIABLE not in os.environ:
        raise ConfigError(f"{found} is there: give --resume to go on, or another --out")
    if flags["plot"]:
        try:
            importlib.import_module("matplotlib")
        except ImportError as error:
            raise ConfigError(
                'the picture needs matplotlib: pip install "stagemesh[train]", or give --no-plot'
            ) from error


def launch_all(num_ranks: int, flags: dict[str, Any]) -> int:
    """This program as ranks, to their end."""
    arguments = [str(Path(__file__).resolve()), *sys.argv[1:]]
    failed = describe_failures(
        launch_ranks(arguments, num_ranks=num_ranks, grace_seconds=flags["timeout"])
    )
    if not failed:
        return 0
    found = latest_checkpoint(flags["run"])
    hint = "" if found is None else f"; --resume goes on from {found.name}, with any ranks"
    raise NotReady(failed + hint)


def be_rank(flags: dict[str, Any], train: TrainConfig) -> int:
    """Train as one rank."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(flags["threads"] or max(1, (os.cpu_count() or 1) // local_ranks))
    device = local_device(flags["device"], os.environ)
    with join_world(
        os.environ, backend=flags["backend"], timeout_seconds=flags["timeout"]
    ) as world:
        resumed = latest_checkpoint(flags["run"]) if flags["resume"] else None
        job = make_job(world, flags, resumed)
        tokens, held_out = split_tokens(job.tokens, held_out=HELD_OUT)
        config = RunConfig(
            run=flags["run"],
            train=train,
            model=job.model,
            weights=job.weights,
            tokens=tokens,
            held_out=held_out,
            resume=resumed,
            save_every=flags["save_every"],
            keep=flags["keep"],
            measure_every=flags["measure_every"],
            files=job.files,
            device=str(device),
        )
        result = train_with_progress(world, config, flags)
    if world.rank == 0:
        report(result, config, flags)
    return 0


def make_job(world: ProcessGroup, flags: dict[str, Any], resumed: Path | None) -> Job:
    """The model of a checkpoint, a new one, or the one asked for; and the text in its tokens."""
    run = flags["run"]
    if resumed is not None:
        return resumed_job(world, run=run, checkpoint=resumed)
    if flags["model"] == FRESH:
        return fresh_job(world, run=run, model=fresh_model(flags), seed=flags["seed"])
    spec = load_model_spec(flags["model"])
    metadata = text_metadata(spec)
    tokenizer, adds_bos = tokenizer_of(spec)
    return fine_tune_job(
        world,
        run=run,
        spec=spec,
        tokenizer=tokenizer,
        chat_template=metadata.chat_template,
        special_tokens=metadata.special_tokens,
        adds_bos=adds_bos if metadata.adds_bos is None else metadata.adds_bos,
    )


def tokenizer_of(spec: ModelSpec) -> tuple[Tokenizer, bool]:
    """The tokenizer of a model of either format; whether prompts begin with BOS if nothing says."""
    if spec.gguf_metadata is not None:
        built = build_gguf_tokenizer(spec.gguf_metadata)
        return built.backend, built.adds_bos
    path = Path(spec.path) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} is not there, which makes tokens of the text to train on")
    return Tokenizer.from_file(str(path)), False


def train_with_progress(world: ProcessGroup, config: RunConfig, flags: dict[str, Any]) -> RunResult:
    """The run, with a bar or lines of JSON on rank 0."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    train = config.train
    shows_bar = world.rank == 0 and not flags["as_json"]
    with Progress(*columns, disable=not shows_bar) as bar:
        task = bar.add_task("", total=train.total_steps, loss=float("nan"), speed=0.0)

        def on_step(entry: HistoryEntry) -> None:
            speed = train.batch_size * train.sequence_length / entry.seconds
            bar.update(task, completed=entry.step, loss=entry.loss, speed=speed)
            if world.rank == 0 and flags["as_json"]:
                say(event="step", step=entry.step, loss=entry.loss, seconds=entry.seconds)

        return run_training(
            world, config, on_step=on_step, before_step=lambda: check_parent(os.environ)
        )


def report(result: RunResult, config: RunConfig, flags: dict[str, Any]) -> None:
    """Say what has come of it, and draw it."""
    last = result.entries[-1]
    if flags["plot"]:
        plot = importlib.import_module("stagemesh.training.plot")
        model = flags["model"] if config.resume is None else f"on from {config.resume.name}"
        title = f"{model}, dp {config.train.topology.dp} pp {config.train.topology.pp} "
        title += f"tp {config.train.topology.tp}{' fsdp' if config.train.fsdp else ''}"
        plot.plot_history(result.entries, config.run / "loss.png", title=title)
    if flags["as_json"]:
        say(
            event="done",
            checkpoint=str(result.checkpoint),
            first_held_out_loss=result.first_held_out_loss,
            held_out_loss=last.held_out_loss,
        )
        return
    if result.first_held_out_loss is not None:
        print(f"held-out loss {result.first_held_out_loss:.3f} -> {last.held_out_loss:.3f}")
    print(f"serve it: coordinator up --model {result.checkpoint}")


def say(**event: Any) -> None:
    """A line of JSON."""
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
