"""Stages of an even pipeline: known values, ends, refusals."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.errors import ConfigError
from stagemesh.placement.pipeline_split import PipelineParallel
from stagemesh.schedule.micro_batch import MicroBatchSchedule


def layer_ranges(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    ranges = []
    for stage in range(num_stages):
        pipeline = PipelineParallel(num_stages, stage)
        pipeline.configure(num_layers)
        ranges.append(pipeline.layer_range())
    return ranges


def test_known_values() -> None:
    assert layer_ranges(80, 4)[1] == (20, 40)
    assert PipelineParallel(4, 0).bubble_ratio(16) == pytest.approx(3 / 19)
    assert PipelineParallel(1, 0).bubble_ratio(16) == 0
    assert PipelineParallel(4, 1).activation_size_mb(4096, 2048, 2, 2) == pytest.approx(33.554432)


def test_the_remainder_goes_to_the_first_stages() -> None:
    assert [end - start for start, end in layer_ranges(10, 3)] == [4, 3, 3]
    assert [end - start for start, end in layer_ranges(29, 7)] == [5, 4, 4, 4, 4, 4, 4]


def test_neighbours_end_at_the_ends() -> None:
    stages = [PipelineParallel(3, stage) for stage in range(3)]
    assert [s.prev_stage() for s in stages] == [None, 0, 1]
    assert [s.next_stage() for s in stages] == [1, 2, None]
    assert [(s.is_first_stage, s.is_last_stage) for s in stages] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    alone = PipelineParallel(1, 0)
    assert alone.is_first_stage
    assert alone.is_last_stage


def test_the_ratio_is_that_of_the_schedule() -> None:
    """The formula against idle slots counted on the grid of a real schedule."""
    for stages, micro_batches in ((4, 16), (2, 3), (3, 1)):
        schedule = MicroBatchSchedule.gpipe(stages, micro_batches)
        idle = Fraction(schedule.bubble_slots(0), 2 * (stages + micro_batches - 1))
        assert PipelineParallel(stages, 0).bubble_ratio(micro_batches) == pytest.approx(float(idle))


@given(num_layers=st.integers(1, 80), data=st.data())
def test_layers_are_covered_exactly_once(num_layers: int, data) -> None:
    ranges = layer_ranges(num_layers, data.draw(st.integers(1, num_layers)))
    assert [layer for r in ranges for layer in range(*r)] == list(range(num_layers))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 stages.*2 layers"):
        PipelineParallel(3, 0).configure(2)


def test_what_makes_no_sense_is_refused() -> None:
    for arguments in ((0, 0), (3, 3), (3, -1)):
        with pytest.raises(ConfigError, match=str(arguments[0])):
            PipelineParallel(*arguments)
    with pytest.raises(ConfigError, match="configure"):
        PipelineParallel(2, 0).layer_range()
    with pytest.raises(ConfigError, match="micro_batches"):
        PipelineParallel(2, 0).bubble_ratio(0)
