"""TrainStep: one optimizer step of a model on a (dp, pp, tp) mesh.

    batch [B, T] --> rows of this replica --> micro-batches --> stages (pp) of shards (tp)
                 --> gradients, averaged over dp --> clipped by their norm over all axes --> AdamW

The loss and the parameters are those that one process would have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from stagemesh.comm.reduce import ReduceOp
from stagemesh.parallel.clipping import global_grad_norm
from stagemesh.parallel.mesh import Mesh
from stagemesh.parallel.pipeline import LlamaStage, PipelineParallel
from stagemesh.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from stagemesh.training.config import TrainConfig
from stagemesh.training.failure import RankFailure
from stagemesh.training.replica import MakeOptimizer, Replica
from stagemesh.training.stages import build_stages, cuts_vocabulary
from stagemesh.training.weights import HEAD, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step was like; the same on all ranks."""

    loss: float
    """Mean over all tokens of the batch, before the update."""
    grad_norm: float
    """Norm of all gradients before they were clipped."""
    learning_rate: float
    """What it was."""


class TrainStep:
    """A model that is trained, on one rank. All ranks call its methods, with the same batches."""

    def __init__(
        self,
        model: Mapping[str, Any],
        *,
        mesh: Mesh,
        config: TrainConfig,
        weights: WeightSource,
        make_optimizer: MakeOptimizer | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Build this rank's part.

        Args:
            model: content of a config.json.
            mesh: of the topology in `config`.
            config: how to train.
            weights: first values.
            make_optimizer: an elementwise one over this rank's parameters; AdamW if left out.
            device: where to compute; the CPU if left out.

        Raises:
            ConfigError, UnsupportedModel: the model cannot be cut in this way.
            CheckpointError: the weights are not the model's.
        """
        self.model = model
        self.mesh = mesh
        self.config = config
        stages = build_stages(model, mesh=mesh, config=config, weights=weights)
        for stage in stages:
            stage.to(device or torch.device("cpu"))
        is_tied_over_pp = bool(model.get("tie_word_embeddings")) and mesh.pp.size > 1
        make = make_optimizer or self._adamw
        # Copies on two ranks must be cut alike; in a flat shard their neighbours differ.
        self.replicas = [
            self._replica(stage, flatten=not is_tied_over_pp, make_optimizer=make)
            for stage in stages
        ]
        ends = [_shared_parameter(stage) for stage in stages] if is_tied_over_pp else []
        tied = [parameter for parameter in ends if parameter is not None]
        self._uncounted = {id(p) for p in tied} if mesh.pp.rank == mesh.pp.size - 1 else set()
        self._pipeline = PipelineParallel(
            [replica.module for replica in self.replicas],
            process_group=mesh.pp,
            num_microbatches=config.num_microbatches,
            schedule=config.schedule,
            loss_fn=self._loss_fn(),
            num_stages=config.num_stages,
            tied_parameters=tied,
            checkpoint_activations=config.checkpoint_activations,
        )
        self._failure = RankFailure(mesh)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, *, step: int) -> StepReport:
        """Forward, backward and update.

        Args:
            inputs: token ids [B, T], the whole batch.
            targets: the next tokens [B, T].
            step: number of steps before; the learning rate depends on it.

        Raises:
            PeerLost: a rank is gone; its number is in the text.
            CommError, StageFailed: the step failed here or elsewhere, and the mesh is aborted.
        """
        with self._failure:
            rate = self.config.learning_rate_at(step)
            for replica in self.replicas:
                replica.optimizer.zero_grad()
            result = self._pipeline.step(self._rows(inputs), self._rows(targets), share_loss=True)
            assert result.loss is not None
            norm = self._clip()
            for replica in self.replicas:
                for group in replica.optimizer.param_groups:
                    group["lr"] = rate
                replica.optimizer.step()
            return StepReport(
                loss=self._mean(result.loss), grad_norm=float(norm), learning_rate=rate
            )

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The loss of a batch, as in `step`; nothing is changed."""
        with self._failure, torch.no_grad():
            logits = self._pipeline(self._rows(inputs))
            loss = torch.zeros(())
            if logits is not None:
                loss = self._loss_fn()(logits, self._rows(targets)).float().cpu()
            if self.mesh.pp.size > 1:
                self.mesh.pp.broadcast(loss, src=self.mesh.pp.size - 1)
            return self._mean(loss)

    def close(self) -> None:
        """Leave the groups that it has opened."""
        self._pipeline.close()

    def _replica(
        self, stage: LlamaStage, *, flatten: bool, make_optimizer: MakeOptimizer
    ) -> Replica:
        return Replica(
            stage,
            dp=self.mesh.dp,
            tp=self.mesh.tp,
            is_sharded=self.config.fsdp,
            is_mixed=self.config.precision == "mixed",
            units=[f"model.layers.{index}" for index in stage.model.layers],
            flatten=flatten,
            make_optimizer=make_optimizer,
        )

    def _rows(self, batch: torch.Tensor) -> torch.Tensor:
        """This replica's part of a batch."""
        return batch.chunk(self.mesh.dp.size)[self.mesh.dp.rank]

    def _mean(self, loss: torch.Tensor) -> float:
        total = loss.detach().double().cpu()
        if self.mesh.dp.size > 1:
            self.mesh.dp.all_reduce(total, op=ReduceOp.AVG)
        return float(total)

    def _clip(self) -> torch.Tensor:
        """The norm over all axes; gradients are scaled if it is too large."""
        parameters = [p for replica in self.replicas for p in replica.module.parameters()]
        norm = global_grad_norm(
            # The head's copy of a tied table has the table's gradient, which counts once.
            [p for p in parameters if id(p) not in self._uncounted],
            groups=[*([self.mesh.dp] if self.config.fsdp else []), self.mesh.pp],
            tensor_group=self.mesh.tp,
        )
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
        return norm

    def _adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=self.config.learning_rate, weight_decay=self.config.weight_decay
        )

    def _loss_fn(self) -> Any:
        if cuts_vocabulary(self.model, self.config):
            return partial(_sharded_loss, group=self.mesh.tp)
        return _whole_loss


def _whole_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    flat = targets.to(logits.device).flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), flat)


def _sharded_loss(logits: torch.Tensor, targets: torch.Tensor, *, group: Any) -> torch.Tensor:
    return vocab_parallel_cross_entropy(logits, targets.to(logits.device), process_group=group)


def _shared_parameter(stage: LlamaStage) -> nn.Parameter | None:
    """The copy of the token table on a stage at an end; what its optimizer sees of it."""
    if stage.is_first == stage.is_last:
        return None
    owner: nn.Module = (
        stage.model.embed_tokens if stage.is_first else stage.get_submodule(HEAD.split(".")[0])
    )
    # Not the attribute: with Fsdp that is the whole parameter, or nothing.
    return owner._parameters["weight"]
