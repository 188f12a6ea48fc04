"""This rank's part of a model: cut into stages without memory, filled, then cut over tp.

    config.json --> whole model on the meta device --> stages --> this rank's, with values
                                                              --> its shards of them

So a rank never holds more than its own stages.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stagemesh.parallel.mesh import Mesh
from stagemesh.parallel.pipeline import LlamaStage, even_counts, split_llama
from stagemesh.parallel.tensor.plan import LayerRule, parallelize
from stagemesh.parallel.tensor.transformers_plan import VocabStyle, transformers_plan
from stagemesh.training.config import TrainConfig, check_model
from stagemesh.training.weights import WeightSource


def build_stages(
    model: Mapping[str, Any], *, mesh: Mesh, config: TrainConfig, weights: WeightSource
) -> list[LlamaStage]:
    """The stages of this rank. All ranks call it.

    Args:
        model: content of a config.json.
        mesh: says which part this is.
        config: how it is cut.
        weights: gives the values.

    Raises:
        UnsupportedModel, ConfigError: see `check_model`.
        CheckpointError: the weights are not those of the model.
    """
    check_model(model, config)
    whole = _on_meta(model)
    tp = config.topology.tp
    plan: dict[str, LayerRule] = {}
    if tp > 1:
        vocab: VocabStyle = "local" if cuts_vocabulary(model, config) else "replicated"
        plan = transformers_plan(whole, num_ranks=tp, vocab=vocab)
    counts = even_counts(model["num_hidden_layers"], num_stages=config.num_stages)
    stages = split_llama(whole, counts=counts)[mesh.pp.rank :: mesh.pp.size]
    for stage in stages:
        _fill(stage, weights, dtype=getattr(torch, config.parameter_dtype))
        stage.model.rotary_emb = LlamaRotaryEmbedding(whole.config)
        names = {name for name, _ in stage.named_modules(remove_duplicate=False)}
        rules = {name: rule for name, rule in plan.items() if name in names}
        if rules:
            parallelize(stage, rules, process_group=mesh.tp)
    return stages


def cuts_vocabulary(model: Mapping[str, Any], config: TrainConfig) -> bool:
    """Whether embedding and head are cut over tp; they stay whole where tp does not divide them."""
    return config.topology.tp > 1 and model["vocab_size"] % config.topology.tp == 0


def _on_meta(model: Mapping[str, Any]) -> Any:
    # transformers changes what it is given.
    config = AutoConfig.for_model(**copy.deepcopy(dict(model)))
    config._attn_implementation = "sdpa"
    config.use_cache = False
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.get_default_dtype()
        )
    if config.tie_word_embeddings:
        whole.lm_head.weight = whole.model.embed_tokens.weight
    return whole.train()


def _fill(stage: nn.Module, weights: WeightSource, *, dtype: torch.dtype) -> None:
    """Give the stage's parameters memory and values; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(stage.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(weights.read(name, tuple(parameter.shape)).to(dtype))
        owner, _, attribute = name.rpartition(".")
        setattr(stage.get_submodule(owner), attribute, made[id(parameter)])
