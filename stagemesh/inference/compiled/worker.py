"""The process that compiles: `python -m stagemesh.inference.compiled.worker JOB.json`.

It builds the family's layers on the meta device, traces each kind with zeros for weights, and lets
torch's ahead-of-time compiler make a package of each. Weights are arguments of the code, so none
are needed here. Beside the job it writes "outcomes", one JSON line for each package with its key
and what went wrong; a package that fails does not stop the others.
"""

import contextlib
import copy
import fcntl
import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from stagemesh.errors import UnsupportedModel
from stagemesh.inference import attention
from stagemesh.inference.compiled.attention_op import traced_attention
from stagemesh.inference.compiled.cache import package_path
from stagemesh.inference.compiled.layer_call import DTYPES_BY_NAME
from stagemesh.inference.compiled.linear_forms import MANY, use_form
from stagemesh.inference.compiled.units import UnitKind, describe
from stagemesh.models.draft import DTYPES
from stagemesh.models.family_config import build_on_meta, checked_config
from stagemesh.models.outline import base_of, find_layers

_NICENESS = 10
_EXAMPLE_TOKENS = 7
"""Tokens of the example that code for any number is traced with; this one is of no meaning."""
_MOST_TOKENS = 1 << 20
# Multiplying and adding in one instruction: a fifth faster for 8 rows, and rounded less.
_OPTIONS = {"cpp.enable_floating_point_contract_flag": "fast"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to compile."""

    model_name: str
    config: dict[str, Any]
    dtype: str
    device: str
    num_threads: int
    folder: Path
    items: tuple[tuple[str, int, UnitKind], ...]
    """Key, form and kind of each package."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "model_name": self.model_name,
            "config": self.config,
            "dtype": self.dtype,
            "device": self.device,
            "num_threads": self.num_threads,
            "folder": str(self.folder),
            "items": [[key, form, kind.to_json()] for key, form, kind in self.items],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Job":
        """From what `to_json` gave."""
        return cls(
            **{k: v for k, v in data.items() if k not in ("folder", "items")},
            folder=Path(data["folder"]),
            items=tuple((key, form, UnitKind.from_json(kind)) for key, form, kind in data["items"]),
        )


class _Traced(nn.Module):
    """A module as a function of its weights and of the tensors among its arguments."""

    def __init__(self, module: nn.Module, kind: UnitKind) -> None:
        super().__init__()
        self._names = [name for name, _, _ in kind.tensors]
        self._call = kind.call
        # Not as a submodule: its tensors are arguments here.
        self.__dict__["target"] = module

    def forward(self, weights: list[torch.Tensor], tensors: list[torch.Tensor]) -> torch.Tensor:
        """Run it; returns the activation."""
        args, kwargs = self._call.arguments(tensors)
        named = dict(zip(self._names, weights, strict=True))
        out = torch.func.functional_call(self.__dict__["target"], named, tuple(args), kwargs)
        first: torch.Tensor = out if isinstance(out, torch.Tensor) else out[0]
        return first


def compile_all(job: Job, *, workplace: Path) -> Iterator[dict[str, str | None]]:
    """Make the job's packages, but for those that others have made meanwhile.

    Args:
        job: what to make.
        workplace: folder for what is not finished, on the disk of the cache.
    """
    AttentionInterface.register(attention.ATTENTION_NAME, traced_attention)
    named: Any = SimpleNamespace(name=job.model_name, config=job.config)
    model = build_on_meta(
        checked_config(named), DTYPES[job.dtype], attention=attention.ATTENTION_NAME
    )
    model.train(mode=False).requires_grad_(requires_grad=False)
    layers: Any = base_of(model).get_submodule(find_layers(model))
    for key, form, kind in job.items:
        path = package_path(job.folder, key)
        error = None
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                module = _head(kind) if kind.layer is None else layers[kind.layer]
                try:
                    made = _build(
                        module, kind, form, folder=workplace, device=torch.device(job.device)
                    )
                    made.replace(path)
                except (
                    Exception
                ) as failure:  # whatever a family's code and the compiler raise ends this package
                    error = f"{type(failure).__name__}: {failure}"
        yield {"key": key, "error": error}


def _head(kind: UnitKind) -> nn.Module:
    tensors = {name: (shape, dtype) for name, shape, dtype in kind.tensors}
    (out_features, in_features), dtype = tensors["weight"]
    return nn.Linear(
        in_features,
        out_features,
        bias="bias" in tensors,
        device="meta",
        dtype=DTYPES_BY_NAME[dtype],
    )


@torch.no_grad()
def _build(
    module: nn.Module, kind: UnitKind, form: int, *, folder: Path, device: torch.device
) -> Path:
    """Trace and compile one form of one kind; returns the package."""
    if kind.layer is not None:
        own = describe(module, layer=kind.layer, call=kind.call)
        if (own.tensors, own.attributes) != (kind.tensors, kind.attributes):
            raise UnsupportedModel("the loaded layer is not as the family's class makes it")
    traced = _Traced(use_form(copy.deepcopy(module), form, device=device), kind)
    count = _EXAMPLE_TOKENS if form == MANY else form
    weights = [
        torch.zeros(shape, dtype=DTYPES_BY_NAME[dtype], device=device)
        for _, shape, dtype in kind.tensors
    ]
    tensors = [argument.zeros(count, device=device) for argument in kind.call.tensors]
    shapes = _dynamic(kind) if form == MANY else None
    program = torch.export.export(traced, (weights, tensors), dynamic_shapes=shapes, strict=False)
    made = torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / f"{form}.pt2"), inductor_configs=_OPTIONS
    )
    return Path(made)


def _dynamic(kind: UnitKind) -> dict[str, list[Any]]:
    """The token axis has any size; all token axes have the same."""
    size = torch.export.Dim("tokens", min=2, max=_MOST_TOKENS)
    axes = [argument.token_axis for argument in kind.call.tensors]
    return {
        "weights": [None for _ in kind.tensors],
        "tensors": [None if axis is None else {axis: size} for axis in axes],
    }


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Processes that need the same package make it once; the lock goes with its process."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Compile the job that the argument names."""
    os.nice(_NICENESS)
    warnings.simplefilter("ignore")
    path = Path(sys.argv[1])
    job = Job.from_json(json.loads(path.read_text(encoding="utf-8")))
    torch.set_num_threads(job.num_threads)
    with path.with_name("outcomes").open("w", encoding="utf-8") as file:
        for outcome in compile_all(job, workplace=path.parent):
            file.write(json.dumps(outcome) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
