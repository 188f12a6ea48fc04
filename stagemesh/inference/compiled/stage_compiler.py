"""Compiles a stage while it serves, and switches it over between two steps.

    load -> code of all kinds in the cache? -yes-> check each layer -> compiled
                  | no
                  v
            worker process (low priority) compiles; the stage serves eagerly
                  | done
                  v
            check each layer -> compiled, or eager with the reason

All methods are for the thread that runs the stage, `status` apart.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stagemesh.errors import ConfigError, StagemeshError, UnsupportedModel
from stagemesh.inference.compiled.cache import (
    compiler,
    environment,
    make_private,
    package_path,
)
from stagemesh.inference.compiled.check import checked_forward
from stagemesh.inference.compiled.code import CompiledForward, Filler, Packages
from stagemesh.inference.compiled.huge_pages import collapse_in_place, use_huge_pages
from stagemesh.inference.compiled.linear_forms import forms_for
from stagemesh.inference.compiled.noted import Unit, note_units
from stagemesh.inference.compiled.units import UnitKind
from stagemesh.inference.compiled.worker import Job
from stagemesh.inference.kv_cache import KVLayout
from stagemesh.model_spec import ModelSpec
from stagemesh.models.builder import StageModel
from stagemesh.models.packed_linear import can_pack, pack_linears
from stagemesh.models.parameters import untie_for_packing

logger = logging.getLogger(__name__)

_WORKER_SECONDS = 1800.0
_STOP_SECONDS = 5.0
NO_COMPILER = "there is no C++ compiler; install g++ (Debian: apt-get install g++), or set CXX"
"""Why a stage is not compiled where nothing can compile it."""


def check_can_compile(folder: Path | None, *, quantize: str, is_shared: bool) -> None:
    """Refuse what compiled code does not do.

    Raises:
        ConfigError: the stage is to be compiled and is quantised or shared by several ranks.
    """
    if folder is None:
        return
    if quantize != "none":
        raise ConfigError(f"compiled stages do not take quantised weights ({quantize}); drop one")
    if is_shared:
        raise ConfigError("compiled stages cannot be shared by tensor-parallel ranks; drop one")


@dataclass(frozen=True, slots=True)
class Package:
    """One form of one kind."""

    kind: UnitKind
    form: int
    key: str
    path: Path


class StageCompiler:
    """Compiles one stage.

    Args:
        spec: the model.
        stage: loaded with plain linears.
        layout: of its caches.
        folder: of the cache of compiled code.
    """

    def __init__(
        self, spec: ModelSpec, stage: StageModel, *, layout: KVLayout, folder: Path
    ) -> None:
        self.status = "compiling"
        """For people: "compiling", "compiled", or "eager: " and the reason."""
        self._spec = spec
        self._stage = stage
        self._layout = layout
        self._folder = folder
        self._units: list[Unit] = []
        self.packages: list[Package] = []
        """All that the stage needs, in the order in which it is worth most."""
        self._process: subprocess.Popen[bytes] | None = None
        self._workplace: tempfile.TemporaryDirectory[str] | None = None
        self._give_up_at = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether the stage has the code that it will keep."""
        return self.status != "compiling"

    def begin(self, run: Callable[[int], None]) -> None:
        """Load the code from the cache, or start the process that makes it.

        Args:
            run: computes a step of so many tokens, with logits for all of them.
        """
        try:
            make_private(self._folder)
            self._units = note_units(self._stage, run)
            self.packages = self._name_packages()
            missing = [p for p in self.packages if not p.path.exists()]
            if missing and compiler() is None:
                raise UnsupportedModel(NO_COMPILER)
            if missing:
                self._start(missing)
        except (StagemeshError, OSError, TypeError) as error:
            self._stay_eager(str(error))
            return
        if not missing:
            self._switch({})

    def advance(self) -> None:
        """Switch over if the process is done; call between steps, now and then."""
        if self._process is None:
            return
        code = self._process.poll()
        if code is None and time.monotonic() < self._give_up_at:
            return
        outcomes = self._outcomes()
        detail = self._last_words()
        self.close()
        if code is None:
            self._stay_eager(f"compiling took more than {_WORKER_SECONDS:.0f} s")
        elif code != 0:
            self._stay_eager(f"the process that compiles ended with {code}: {detail}")
        else:
            self._switch(outcomes)

    def close(self) -> None:
        """End the process, if it runs."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=_STOP_SECONDS)
        if self._workplace is not None:
            self._workplace.cleanup()
            self._workplace = None

    def _name_packages(self) -> list[Package]:
        device = self._stage.device
        base = environment(
            dict(self._spec.config),
            dtype=self._stage.dtype,
            device=device,
            num_threads=torch.get_num_threads(),
        )
        found: dict[str, Package] = {}
        for form in forms_for(device, self._stage.dtype):
            for unit in self._units:
                key = unit.kind.key(base, form)
                path = package_path(self._folder, key)
                found.setdefault(key, Package(unit.kind, form, key, path))
        return list(found.values())

    def _start(self, missing: list[Package]) -> None:
        self._workplace = tempfile.TemporaryDirectory(dir=self._folder, prefix="job-")
        place = Path(self._workplace.name)
        job = Job(
            model_name=self._spec.name,
            config=dict(self._spec.config),
            dtype=str(self._stage.dtype).removeprefix("torch."),
            device=str(self._stage.device),
            num_threads=torch.get_num_threads(),
            folder=self._folder,
            items=tuple((p.key, p.form, p.kind) for p in missing),
        )
        (place / "job.json").write_text(json.dumps(job.to_json()), encoding="utf-8")
        with (place / "words").open("wb") as words:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "stagemesh.inference.compiled.worker"),
                    str(place / "job.json"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor")},
            )
        self._give_up_at = time.monotonic() + _WORKER_SECONDS
        logger.info("compiling", extra={"packages": len(missing), "folder": str(self._folder)})

    def _outcomes(self) -> dict[str, str]:
        """Why packages could not be made, by key."""
        assert self._workplace is not None
        lines = (Path(self._workplace.name) / "outcomes").read_text(encoding="utf-8").splitlines()
        told = [json.loads(line) for line in lines]
        return {outcome["key"]: outcome["error"] for outcome in told if outcome["error"]}

    def _last_words(self) -> str:
        assert self._workplace is not None
        path = Path(self._workplace.name) / "words"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"

    def _switch(self, failures: dict[str, str]) -> None:
        """Give each layer that can have it its compiled forward."""
        filler = Filler()
        loaded: dict[UnitKind, Packages | str] = {}
        ready: list[tuple[Unit, CompiledForward]] = []
        refused: dict[str, list[Unit]] = {}
        for unit in self._units:
            own = [p for p in self.packages if _is_alike(p.kind, unit.kind)]
            first = own[0].kind
            if first not in loaded:
                loaded[first] = self._load(own, failures)
            packages = loaded[first]
            try:
                if isinstance(packages, str):
                    raise UnsupportedModel(packages)
                forward = checked_forward(
                    unit,
                    packages,
                    filler=filler,
                    layout=self._layout,
                    first_layer=self._stage.start_layer,
                )
            except (StagemeshError, RuntimeError) as error:
                refused.setdefault(str(error), []).append(unit)
                continue
            ready.append((unit, forward))
        self._settle(ready, refused)

    def _load(self, packages: list[Package], failures: dict[str, str]) -> Packages | str:
        for package in packages:
            if package.key in failures:
                return failures[package.key]
        try:
            return Packages.load({p.form: p.path for p in packages}, device=self._stage.device)
        except (RuntimeError, OSError) as error:
            for package in packages:
                package.path.unlink(missing_ok=True)  # or it would fail at each start
            return f"the cached code cannot be loaded: {error}"

    def _settle(
        self, ready: list[tuple[Unit, CompiledForward]], refused: dict[str, list[Unit]]
    ) -> None:
        for reason, units in refused.items():
            logger.warning(
                "not compiled: %s", reason, extra={"layers": ", ".join(u.name for u in units)}
            )
        if not ready:
            self._stay_eager(next(iter(refused)))
            return
        for unit, forward in ready:
            module: Any = unit.module
            module.forward = forward
            if unit.layer is None:
                collapse_in_place(module.weight)  # which the token table may share
            else:
                use_huge_pages(module)
            forward.take_weights()
        num_refused = len(self._units) - len(ready)
        for unit in (u for units in refused.values() for u in units if u.layer is not None):
            if can_pack(self._stage.device):
                pack_linears(unit.module)
        self.status = "compiled"
        if refused:
            reason = next(iter(refused))
            self.status = f"compiled, but for {num_refused} of {len(self._units)} parts: {reason}"
        self._units = []
        logger.info("runs compiled code", extra={"parts": len(ready), "eager": num_refused})

    def _stay_eager(self, reason: str) -> None:
        self.close()
        self._units = []
        # The linears were left plain for the compiler.
        if can_pack(self._stage.device):
            untie_for_packing(self._stage.model)
            pack_linears(self._stage.model)
        self.status = f"eager: {reason}"
        logger.warning("the stage stays eager: %s", reason, extra={"model": self._spec.name})


def _is_alike(a: UnitKind, b: UnitKind) -> bool:
    """Whether two parts run the same code; they may be different layers."""
    return ((a.layer is None) == (b.layer is None)) and (
        (a.call, a.tensors, a.attributes) == (b.call, b.tensors, b.attributes)
    )
