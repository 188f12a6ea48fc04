"""A rank's parts of a checkpoint in files of their own, as a node's cache has them."""

import dataclasses
from pathlib import Path

from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.checkpoint.weight_part import WeightPart
from stagemesh.model_spec import ModelSpec
from stagemesh.weight_transfer.manifest import relocated


def keep_parts(spec: ModelSpec, parts: dict[str, WeightPart | None], folder: Path) -> ModelSpec:
    """The model, of which nothing is there but the parts."""
    folder.mkdir(parents=True)

    def kept(info: TensorInfo) -> TensorInfo:
        if info.name not in parts:
            return dataclasses.replace(info, file=folder / "not-kept", offset=0)
        part = parts[info.name]
        file = folder / f"{len(list(folder.iterdir()))}"
        file.write_bytes(data_of(info, part))
        return dataclasses.replace(info, file=file, offset=0, part=part)

    return relocated(spec, kept)


def data_of(info: TensorInfo, part: WeightPart | None) -> bytes:
    """A part's bytes, cut out block by block and row by row."""
    with info.file.open("rb") as file:
        file.seek(info.offset)
        whole = file.read(info.num_bytes)
    if part is None:
        return whole
    rows = [whole[start : start + part.row_bytes] for start in range(0, len(whole), part.row_bytes)]
    return b"".join(
        row[block.first_byte : block.end_byte]
        for block in part.blocks
        for row in rows[block.first_row : block.end_row]
    )
