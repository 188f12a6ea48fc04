"""What happens when a module is wrapped: comparison, broadcast; and buffers later."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.data.config import DataParallelConfig
from stagemesh.parallel.data.data_parallel import DataParallel
from tests.support.ranks import run_ranks


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.randn(5).bfloat16(), requires_grad=False)
        self.register_buffer("noise", torch.randn(4))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("table", torch.randn(2), persistent=False)
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.linear(x))
        return result


@pytest.mark.parametrize("backend", ["local", "gloo"])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_all_start_from_the_values_of_rank_0(backend: str, bucket_bytes: int) -> None:
    def on_rank(group: ProcessGroup) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        module = Mixed()
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.dtype.is_floating_point:
                    tensor.add_(group.rank)
        before = {name: value.clone() for name, value in everything(module).items()}
        DataParallel(
            module,
            process_group=group,
            config=DataParallelConfig(bucket_bytes=bucket_bytes),
        )
        return before, everything(module)

    [(first, kept), (other, got)] = run_ranks(2, on_rank, backend=backend)
    assert len(first) == 12
    for name, value in first.items():
        assert torch.equal(kept[name], value)
        assert torch.equal(got[name], value)
    assert not torch.equal(other["linear.weight"], first["linear.weight"])  # negative control


def everything(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            [
                lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
                lambda: nn.Sequential(nn.Linear(4, 4)),
            ],
            r"rank 0 has 4 parameters and 0 buffers, rank 1 has 2 parameters and 0 buffers; .*"
            r"rank 0 has parameter 1\.weight: trained float32\[2, 4\], rank 1 has nothing",
        ),
        (
            [lambda: nn.Linear(4, 2, bias=False), lambda: nn.Linear(2, 4, bias=False)],
            r"rank 0 has parameter weight: trained float32\[2, 4\], rank 1 has parameter weight: "
            r"trained float32\[4, 2\]",
        ),
        (
            [lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2).double()],
            r"trained float32\[2, 2\], rank 1 has parameter weight: trained float64\[2, 2\]",
        ),
        (
            [lambda: nn.Linear(2, 2), lambda: frozen(nn.Linear(2, 2))],
            r"weight: trained float32\[2, 2\], rank 1 has parameter weight: frozen",
        ),
        (
            [lambda: nn.BatchNorm1d(2), lambda: nn.BatchNorm1d(2, track_running_stats=False)],
            r"2 parameters and 3 buffers, rank 1 has 2 parameters and 0 buffers",
        ),
    ],
)
def test_different_modules_fail_on_all_ranks(
    make: list[Callable[[], nn.Module]], words: str
) -> None:
    def on_rank(group: ProcessGroup) -> None:
        with pytest.raises(ConfigError, match=words):
            DataParallel(make[group.rank](), process_group=group)

    started = time.perf_counter()
    run_ranks(2, on_rank, timeout_seconds=10.0)
    assert time.perf_counter() - started < 5


def test_different_settings_fail_on_all_ranks() -> None:
    def on_rank(group: ProcessGroup) -> None:
        config = DataParallelConfig(bucket_bytes=100 + group.rank)
        with pytest.raises(ConfigError, match=r"bucket_bytes=100.* rank 1 has .*bucket_bytes=101"):
            DataParallel(nn.Linear(1, 1), process_group=group, config=config)

    run_ranks(2, on_rank)


def test_a_rank_that_does_not_wrap_is_noticed_in_time() -> None:
    def on_rank(group: ProcessGroup) -> str:
        if group.rank == 1:
            group.barrier()
            return ""
        DataParallel(nn.Linear(1, 1), process_group=group)
        return ""

    with pytest.raises(Exception, match="barrier") as caught:
        run_ranks(2, on_rank, timeout_seconds=1.0)
    assert type(caught.value).__name__ == "CollectiveMismatch"


def test_a_thawed_parameter_is_refused() -> None:
    def on_rank(group: ProcessGroup) -> None:
        module = nn.Linear(2, 2)
        module.bias.requires_grad_(False)
        model = DataParallel(module, process_group=group)
        module.bias.requires_grad_(True)
        with pytest.raises(ConfigError, match="bias were frozen when the module was wrapped"):
            model(torch.ones(1, 2))

    run_ranks(2, on_rank)


def test_frozen_parameters_stay() -> None:
    def on_rank(group: ProcessGroup) -> tuple[bool, bool]:
        module = nn.Sequential(frozen(nn.Linear(2, 2)), nn.Linear(2, 2))
        model = DataParallel(module, process_group=group)
        before = module[0].weight.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return torch.equal(before, module[0].weight), module[0].weight.grad is None

    assert run_ranks(2, on_rank) == [(True, True)] * 2


def test_a_module_without_trained_parameters() -> None:
    def on_rank(group: ProcessGroup) -> float:
        model = DataParallel(frozen(nn.Linear(1, 1)), process_group=group)
        return float(model(torch.ones(1, 1)))

    [ours, theirs] = run_ranks(2, on_rank)
    assert ours == theirs


@pytest.mark.parametrize(
    ("sync_buffers", "is_training", "is_synced", "expected"),
    [
        (True, True, True, [0.0, 0.0]),
        (False, True, True, [0.0, 1.0]),
        (True, False, True, [0.0, 1.0]),
        (True, True, False, [0.0, 1.0]),
    ],
)
def test_buffers_before_a_forward(
    sync_buffers: bool, is_training: bool, is_synced: bool, expected: list[float]
) -> None:
    def on_rank(group: ProcessGroup) -> float:
        config = DataParallelConfig(sync_buffers=sync_buffers)
        module = Mixed()
        model = DataParallel(module, process_group=group, config=config).train(is_training)
        module.noise.fill_(float(group.rank))
        if is_synced:
            model(torch.randn(2, 3))
        else:
            with model.no_sync():
                model(torch.randn(2, 3))
        return float(module.noise[0])

    assert run_ranks(2, on_rank) == expected


def test_buffers_that_no_checkpoint_has_are_constants() -> None:
    def on_rank(group: ProcessGroup) -> float:
        module = Mixed()
        model = DataParallel(module, process_group=group)
        module.table.fill_(float(group.rank))
        model(torch.randn(2, 3))
        return float(module.table[0])

    assert run_ranks(2, on_rank) == [0.0, 1.0]


def test_two_forwards_before_one_backward() -> None:
    """Buffers that the first graph has seen are written by the second forward."""

    def on_rank(group: ProcessGroup) -> torch.Tensor:
        torch.manual_seed(group.rank)
        module = Mixed()
        model = DataParallel(module, process_group=group)
        first = model(torch.randn(4, 3)).square().mean()
        second = model(torch.randn(4, 3)).square().mean()
        (first + 2 * second).backward()
        assert module.linear.weight.grad is not None
        return module.linear.weight.grad.clone()

    [ours, theirs] = run_ranks(2, on_rank)
    assert torch.equal(ours, theirs)
