"""Which part of the model each tensor belongs to: a layer, the first stage or the last. Torch-free.

embed_tokens | layers.0 ... layers.N-1 | norm, lm_head
first stage    its own stage             last stage
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from stagemesh.checkpoint.tensor_info import TensorInfo, same_data
from stagemesh.errors import CheckpointError

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d{1,6})\.", re.ASCII)
_FIRST_STAGE = re.compile(r"embed|wte|wpe|^transformer\.w\.|project_in")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|tokens_embed)\.weight$"
    r"|^transformer\.w\.weight$"
)
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.(?:weight|bias)$")
# Old checkpoints store tables that the model computes itself; transformers drops them, too.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$|\.(?:attn|attention)\.(?:masked_)?bias$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroups:
    """The tensors of a model by the part that needs them."""

    embedding: TensorInfo
    """The token table."""
    first: tuple[TensorInfo, ...]
    """What only the first stage needs: the token table, learned positions, ..."""
    layers: tuple[tuple[TensorInfo, ...], ...]
    """By layer."""
    last: tuple[TensorInfo, ...]
    """What only the last stage needs besides the head: the final norm, ..."""
    head: tuple[TensorInfo, ...]
    """The file's own head (weight, in some families a bias); empty when the token table is it."""
    unused_head: TensorInfo | None
    """A head in the file that is a bit-identical copy of the tied token table, and is not read."""


def group_tensors(
    tensors: Iterable[TensorInfo],
    *,
    num_layers: int,
    tie_word_embeddings: bool,
    allow_missing: bool,
    where: str,
) -> TensorGroups:
    """Sorts the tensors into groups and checks that no part of the model is without weights.

    Args:
        tensors: all tensors of the model.
        num_layers: layers of the model; tensors of further layers are left out.
        tie_word_embeddings: whether the head is the token table.
        allow_missing: whether a layer may hold only a part of what other layers hold.
        where: named in errors.

    Raises:
        CheckpointError: a layer, the token table or an untied head is missing.
    """
    outside: list[TensorInfo] = []
    by_layer: dict[int, list[TensorInfo]] = {}
    for info in tensors:
        if _is_computed(info):
            continue
        match = _LAYER.search(info.name)
        if match is None:
            outside.append(info)
        elif int(match[1]) < num_layers:
            by_layer.setdefault(int(match[1]), []).append(info)
    head = [info for info in outside if _HEAD.search(info.name)]
    rest = [info for info in outside if not _HEAD.search(info.name)]
    first = [info for info in rest if _FIRST_STAGE.search(info.name)]
    embedding = _find_embedding(first, where=where)
    head_weight = next((info for info in head if info.name.endswith(".weight")), None)
    if head_weight is None and not tie_word_embeddings:
        raise CheckpointError(
            f"{where}: tensor lm_head.weight is missing and tie_word_embeddings is false"
        )
    layers = _list_layers(by_layer, num_layers=num_layers, where=where)
    if not allow_missing:
        _check_layers(layers, where=where)
    is_copy = tie_word_embeddings and head_weight is not None and same_data(head_weight, embedding)
    return TensorGroups(
        embedding=embedding,
        first=tuple(first),
        layers=tuple(tuple(layer) for layer in layers),
        last=tuple(info for info in rest if info not in first),
        head=tuple(info for info in head if not (is_copy and info is head_weight)),
        unused_head=head_weight if is_copy else None,
    )


def _is_computed(info: TensorInfo) -> bool:
    # A bias vector has one axis; the causal masks that share its name have four or none.
    return bool(_COMPUTED.search(info.name)) and (
        len(info.shape) != 1 or info.name.endswith("inv_freq")
    )


def _find_embedding(candidates: list[TensorInfo], *, where: str) -> TensorInfo:
    for info in candidates:
        if _EMBEDDING.search(info.name) and len(info.shape) == 2:
            return info
    raise CheckpointError(
        f"{where}: missing keys: the token embedding (model.embed_tokens.weight, wte.weight, ...) "
        "is in no file"
    )


def _list_layers(
    by_layer: dict[int, list[TensorInfo]], *, num_layers: int, where: str
) -> list[list[TensorInfo]]:
    """All layers in order. Stops at the first that is missing, so a huge count costs nothing."""
    layers: list[list[TensorInfo]] = []
    for index in range(num_layers):
        if index not in by_layer:
            raise CheckpointError(
                f"{where}: missing keys: no tensor of layer {index} is in a file; "
                f"the config says {num_layers} layers"
            )
        layers.append(by_layer[index])
    return layers


def _check_layers(layers: list[list[TensorInfo]], *, where: str) -> None:
    """Refuses a layer that holds only a part of what another layer holds.

    Layers of different kinds (dense and sparse ones, say) each have something that the other
    kind lacks, so neither is a part of the other.
    """
    names_by_layer = [frozenset(_name_in_layer(info.name) for info in layer) for layer in layers]
    kinds = set(names_by_layer)
    for index, names in enumerate(names_by_layer):
        larger = next((kind for kind in kinds if names < kind), None)
        if larger is not None:
            missing = ", ".join(sorted(larger - names)[:5])
            raise CheckpointError(f"{where}: missing keys: layer {index} lacks {missing}")


def _name_in_layer(name: str) -> str:
    match = _LAYER.search(name)
    assert match is not None
    return name[match.end() :]
