"""Which bytes of the files a rank of a stage will read, found before the files are there.

A draft of the stage is read by a reader that only takes notes. So it is the same code that asks for
the same tensors, and families, formats, low bits and cuts need no rules of their own here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.checkpoint.weight_part import WeightBlock, WeightPart, union_of
from stagemesh.inference import attention
from stagemesh.model_spec import ModelSpec
from stagemesh.models.draft import draft_stage, refusing_family_errors
from stagemesh.models.tensor_cut import Range
from stagemesh.models.weights import RowSpan, WeightReader, row_runs
from stagemesh.placement.tensor_shares import TensorShares

_META = torch.device("meta")


def plan_reads(
    spec: ModelSpec,
    *,
    start_layer: int,
    end_layer: int,
    dtype: str,
    quantize: str,
    shares: TensorShares,
    rank: int,
) -> dict[str, WeightPart | None]:
    """What `StageEngine.load`, called with the same, reads of each tensor.

    Returns:
        By the tensors' names; None for all of one. A tensor without a name here is not read.

    Raises:
        ConfigError: a value is not one of its kind.
        UnsupportedModel: the family cannot be run in stages, or not by several ranks.
        CheckpointError: a parameter is missing in the checkpoint or has another shape.
    """
    attention.register()
    notes = NotingReader(spec)
    with refusing_family_errors(spec):
        draft = draft_stage(
            spec,
            start_layer=start_layer,
            end_layer=end_layer,
            dtype=dtype,
            attention=attention.ATTENTION_NAME,
            shares=shares,
            rank=rank,
        )
        draft.read(notes, quantize=quantize, device=_META)
    return notes.parts()


class _Reads:
    """What is read of one tensor."""

    def __init__(self, info: TensorInfo, row_bytes: int) -> None:
        self.blocks: list[WeightBlock] = []
        self._num_bytes = info.num_bytes
        self._row_bytes = row_bytes

    def part(self) -> WeightPart | None:
        return union_of(self.blocks, row_bytes=self._row_bytes, num_bytes=self._num_bytes)


class NotingReader(WeightReader):
    """Reads nothing and notes what it would; gives tensors without data.

    Args:
        spec: the model.
    """

    device = _META

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._reads: dict[str, _Reads] = {}

    def parts(self) -> dict[str, WeightPart | None]:
        """What would have been read of each tensor so far; None for all of it."""
        return {name: read.part() for name, read in self._reads.items()}

    @contextmanager
    def _opened(self, info: TensorInfo) -> Iterator[int]:
        yield -1

    def _fill(
        self,
        rows: torch.Tensor,
        row_range: Range,
        span: RowSpan,
        info: TensorInfo,
        descriptor: int,
        decode: object,
    ) -> None:
        read = self._reads.setdefault(info.name, _Reads(info, span.row_bytes))
        end_byte = span.offset + span.num_bytes
        for start, end, _ in row_runs(info, *row_range):
            read.blocks.append(WeightBlock(start, end, span.offset, end_byte))
