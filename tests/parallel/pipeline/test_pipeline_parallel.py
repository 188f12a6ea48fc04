"""PipelineParallel's own interface: sweeps, payloads, synced stages, overtaking, failures."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import (
    CommError,
    ConfigError,
    GroupAborted,
    NotReady,
    ProtocolError,
    StageFailed,
)
from stagemesh.parallel.pipeline import PipelineParallel
from stagemesh.parallel.pipeline.payload import NO_SAMPLES, Payload, payload_of, read_payload
from stagemesh.schedule.builders import one_f_one_b, zero_bubble
from stagemesh.schedule.schedule import Schedule
from tests.parallel.pipeline.reference import (
    assert_same,
    make_batch,
    make_model,
    train_alone,
    train_in_pipeline,
)
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_forward_and_backward_apart(stages_per_rank: int) -> None:
    layers = [nn.Linear(3, 3) for _ in range(2 * stages_per_rank)]
    for layer in layers:
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(2))
    x = torch.randn(5, 3, requires_grad=True)
    expected = nn.Sequential(*layers)(x)
    grad_outputs = torch.randn(5, 3)
    expected.backward(grad_outputs)
    weights = [layer.weight.grad.clone() for layer in layers]
    for layer in layers:
        layer.zero_grad()

    def run(group: ProcessGroup) -> Any:
        pipeline = PipelineParallel(
            layers[group.rank :: group.size],
            process_group=group,
            num_microbatches=3,
            schedule="interleaved" if stages_per_rank > 1 else "one_f_one_b",
        )
        with torch.no_grad():
            pipeline.forward(x)
        outputs = pipeline(x)
        return outputs, pipeline.backward(grad_outputs if pipeline.is_last else None)

    first, second = run_ranks(2, run)
    assert first[0] is None
    assert second[1] is None
    torch.testing.assert_close(second[0], expected.detach())
    torch.testing.assert_close(first[1], x.grad)
    for layer, weight in zip(layers, weights, strict=True):
        torch.testing.assert_close(layer.weight.grad, weight)


def test_a_backward_needs_a_forward() -> None:
    def run(group: ProcessGroup) -> None:
        pipeline = PipelineParallel(nn.Identity(), process_group=group, num_microbatches=1)
        with torch.no_grad():
            pipeline.forward(torch.ones(1, 1))
        with pytest.raises(NotReady, match=r"needs a forward\(\) in grad mode"):
            pipeline.backward(torch.ones(1, 1))

    run_ranks(1, run)


class Fork(nn.Module):
    """Gives several tensors: one that the next stage does not use, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x), x.sum(1) * self.linear.bias[0], torch.arange(len(x))


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, unused: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int64
        assert not ids.requires_grad
        return self.linear(x) * ids[:, None]


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zero_bubble"])
@pytest.mark.parametrize("backend", ["local", "grpc", "gloo"])
def test_activations_of_several_tensors(schedule: str, backend: str) -> None:
    torch.manual_seed(0)
    first, second = Fork(), Join()
    x, y = torch.randn(2, 6, 3).unbind()
    parts = [(x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)]
    sum(nn.functional.mse_loss(second(*first(a)), b) / 3 for a, b in parts).backward()
    expected = [p.grad.clone() for m in (first, second) for p in m.parameters()]
    for module in (first, second):
        module.zero_grad()

    def run(group: ProcessGroup) -> None:
        pipeline = PipelineParallel(
            (first, second)[group.rank],
            process_group=group,
            num_microbatches=3,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        )
        pipeline.step(x, y)

    run_ranks(2, run, backend=backend)
    found = [p.grad for m in (first, second) for p in m.parameters()]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "payload",
    [
        payload_of((torch.randn(2, 3, requires_grad=True),)),
        payload_of((torch.randn(2, 3),)),
        payload_of((torch.tensor(2.0, requires_grad=True),)),
        payload_of((torch.randn(0, 3, dtype=torch.bfloat16, requires_grad=True),)),
        payload_of((torch.arange(3), None, torch.randn(2, 2, requires_grad=True))),
        payload_of((None,)),
        NO_SAMPLES,
    ],
)
def test_messages_say_what_they_carry(payload: Payload) -> None:
    messages = iter(payload.messages())
    first = next(messages)
    read = read_payload(first, read_next=lambda count: [next(messages) for _ in range(count)])
    assert (read.is_empty, read.wants_grad) == (payload.is_empty, payload.wants_grad)
    for mine, right in zip(read.tensors, payload.tensors, strict=True):
        assert (mine is None) == (right is None)
        assert right is None or torch.equal(mine, right)
    assert next(messages, None) is None


@pytest.mark.parametrize("alien", [torch.tensor(1.0), torch.ones(3, 2), torch.ones(2, 2)])
def test_what_is_no_payload_is_refused(alien: torch.Tensor) -> None:
    with pytest.raises(ProtocolError, match="something else uses the pipeline's group"):
        read_payload(alien, read_next=lambda count: [])


class Synced(nn.Module):
    """Counts what a data-parallel wrapper would do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.is_syncing = True
        self.log: list[str] = []
        self.linear.weight.register_hook(self._note)

    def _note(self, _: torch.Tensor) -> None:
        self.log.append("reduced" if self.is_syncing else "kept")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_syncing = False
        try:
            yield
        finally:
            self.is_syncing = True

    def sync_gradients(self) -> None:
        self.log.append("synced")


@pytest.mark.parametrize(
    ("schedule", "num_samples", "expected"),
    [
        ("gpipe", 3, ["kept", "kept", "reduced"]),
        ("one_f_one_b", 3, ["kept", "kept", "reduced"]),
        ("zero_bubble", 3, ["kept", "kept", "kept", "synced"]),
        # The last micro-batch has no samples, so no backward of it could reduce anything.
        ("one_f_one_b", 2, ["kept", "kept", "synced"]),
        ("zero_bubble", 2, ["kept", "kept", "synced"]),
    ],
)
def test_a_synced_stage_reduces_once_per_step(
    schedule: str, num_samples: int, expected: list[str]
) -> None:
    def run(group: ProcessGroup) -> list[str]:
        stage = Synced()
        pipeline = PipelineParallel(
            stage,
            process_group=group,
            num_microbatches=3,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        )
        batch = torch.ones(num_samples, 2)
        pipeline.step(batch, batch)
        return stage.log

    assert run_ranks(2, run) == [expected] * 2


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_messages_may_overtake_each_other(schedule: str) -> None:
    stages_per_rank = 2 if schedule == "interleaved" else 1
    model, batches = make_model(), [make_batch(6, seed=seed) for seed in range(3)]
    reference = train_alone(make_model(), batches)
    for seed in range(3):
        ours = train_in_pipeline(
            model,
            batches,
            num_ranks=3,
            num_microbatches=4,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            order=random.Random(seed),
        )
        assert_same(ours, reference)


class Failing(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise ValueError("no such token")
        y = self.linear(x)
        if self.where == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, _: torch.Tensor) -> None:
        raise ValueError("gradient is nan")


@pytest.mark.parametrize("backend", ["local", "grpc", "gloo"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_a_stage_ends_the_step_on_all_ranks(where: str, backend: str) -> None:
    def run(group: ProcessGroup) -> BaseException:
        stage = Failing(where if group.rank == 1 else "nowhere")
        pipeline = PipelineParallel(
            stage, process_group=group, num_microbatches=3, loss_fn=nn.functional.mse_loss
        )
        began = time.perf_counter()
        with pytest.raises((StageFailed, GroupAborted)) as caught:
            pipeline.step(torch.ones(3, 2), torch.ones(3, 2))
        assert time.perf_counter() - began < 8
        return caught.value

    errors = run_ranks(3, run, backend=backend, timeout_seconds=10)
    failed = errors[1]
    assert isinstance(failed, StageFailed)
    assert (failed.stage, failed.error_type) == (1, "ValueError")
    assert failed.operation == f"{where} of stage 1, micro-batch 0"
    assert isinstance(failed.__cause__, ValueError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, GroupAborted)
        assert f"{where} of stage 1, micro-batch 0 failed on rank 1: ValueError" in str(error)


def test_a_rank_that_does_not_come_is_missed_at_the_deadline() -> None:
    def run(group: ProcessGroup) -> Any:
        pipeline = PipelineParallel(
            nn.Linear(2, 2),
            process_group=group,
            num_microbatches=2,
            loss_fn=nn.functional.mse_loss,
        )
        if group.rank == 1:
            return None
        with pytest.raises(Exception, match=r"timed out on rank 0 after 1 s: waiting for rank 1"):
            pipeline.step(torch.ones(2, 2), torch.ones(2, 2))
        return "raised"

    assert run_ranks(2, run, timeout_seconds=1.0)[0] == "raised"


def test_a_rank_that_stops_receiving_is_missed_at_the_deadline() -> None:
    # The last rank's last gradient: over Gloo its send ends only with the receive.
    def run(group: ProcessGroup) -> Any:
        pipeline = PipelineParallel(
            nn.Linear(2, 2),
            process_group=group,
            num_microbatches=1,
            schedule="gpipe",
            loss_fn=nn.functional.mse_loss,
        )
        if group.rank == 0:
            group.isend(torch.ones(1, 1, 2), dst=1).wait()  # its activation, and no more
            return has_raised.wait(15)
        with pytest.raises(CommError, match="has not ended in the 1 s"):
            pipeline.step(torch.ones(1, 2), torch.ones(1, 2))
        has_raised.set()
        return True

    has_raised = threading.Event()
    assert run_ranks(2, run, backend="gloo", timeout_seconds=1.0) == [True, True]


@pytest.mark.parametrize("backend", ["local", "grpc", "gloo"])
def test_more_microbatches_than_messages_may_be_on_their_way(backend: str) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.002)
            return x

    def run(group: ProcessGroup) -> Any:
        pipeline = PipelineParallel(
            (nn.Linear(2, 2), Slow())[group.rank],
            process_group=group,
            num_microbatches=80,
            schedule="gpipe",
            loss_fn=nn.functional.mse_loss,
        )
        batch = torch.ones(80, 2)
        return [pipeline.step(batch, batch, share_loss=True).loss.item() for _ in range(2)]

    (first, again), other = run_ranks(2, run, backend=backend)
    assert [first, again] == other
    assert first == again


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "1f1b"}, "schedule must be one of gpipe"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"num_stages": 3}, "num_stages is 3, the modules make 2"),
        ({"schedule": one_f_one_b(3, 2)}, "is for 3 ranks and 2 micro-batches"),
        ({"schedule": one_f_one_b(2, 3)}, "is for 2 ranks and 3 micro-batches"),
        ({"stages": [nn.Identity(), nn.Identity()]}, "has one stage per rank, got 2"),
        (
            {"schedule": one_f_one_b(2, 2), "stages": [nn.Identity(), nn.Identity()]},
            "has 1 stages on rank 0, got 2 modules",
        ),
        (
            {
                "schedule": Schedule(
                    name="mine",
                    num_microbatches=2,
                    stage_ranks=(0, 1),
                    programs=(one_f_one_b(2, 2).programs[0], zero_bubble(2, 2).programs[1][1:]),
                )
            },
            "forward of stage 1, micro-batch 0 is there 0 times",
        ),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_made(options: dict[str, Any], says: str) -> None:
    def run(group: ProcessGroup) -> None:
        made = {"stages": nn.Identity(), "num_microbatches": 2, **options}
        stages = made.pop("stages")
        with pytest.raises(ConfigError, match=says.replace("rank 0", f"rank {group.rank}")):
            PipelineParallel(stages, process_group=group, **made)

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("of_rank", "says"),
    [
        ([{"schedule": "gpipe"}, {"schedule": "zero_bubble"}], "must have the same schedule"),
        ([{"num_microbatches": 2}, {"num_microbatches": 3}], "rank 1: 2 stages, 3 micro-batches"),
        ([{"tied_parameters": [nn.Parameter(torch.ones(1))]}, {}], "tied parameters, got 1 and 0"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_of_them(of_rank, says: str) -> None:
    def run(group: ProcessGroup) -> None:
        options = {"num_microbatches": 2, **of_rank[group.rank]}
        with pytest.raises(ConfigError, match=says):
            PipelineParallel(nn.Identity(), process_group=group, **options)

    run_ranks(2, run)


def test_a_schedule_of_ones_own_runs() -> None:
    # Both middle stages on rank 1, the ends on rank 0: as no builder has it.
    schedule = Schedule(
        name="mine",
        num_microbatches=1,
        stage_ranks=(0, 1, 1, 0),
        programs=tuple(
            tuple(action for stage in stages for action in one_f_one_b(4, 1).programs[stage][:1])
            + tuple(
                action for stage in stages[::-1] for action in one_f_one_b(4, 1).programs[stage][1:]
            )
            for stages in ([0, 3], [1, 2])
        ),
    )
    generator = torch.Generator().manual_seed(3)
    layers = [nn.Linear(2, 2) for _ in range(4)]
    for layer in layers:
        nn.init.normal_(layer.weight, generator=generator)
    x = torch.randn(3, 2, generator=generator)
    nn.functional.mse_loss(nn.Sequential(*layers)(x), x).backward()
    expected = [layer.weight.grad.clone() for layer in layers]
    for layer in layers:
        layer.zero_grad()

    def run(group: ProcessGroup) -> None:
        pipeline = PipelineParallel(
            [layers[stage] for stage in schedule.stages_of(group.rank)],
            process_group=group,
            num_microbatches=1,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        )
        pipeline.step(x, x)

    run_ranks(2, run)
    torch.testing.assert_close([layer.weight.grad for layer in layers], expected)
