"""transformers' generate in a process of its own: the peer of benchmarks.decode.

`python -m benchmarks.transformers_peer DTYPE THREADS` reads one JSON request a line from standard
input, {"prompts": [[ids]], "new_tokens": n}, and answers {"seconds": s, "tokens": [[ids]]}. Its
weights are those that the nodes load, dequantised to the same dtype.
"""

import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.draft import DTYPES
from stagemesh.models.weights import WeightReader


def load(spec: ModelSpec, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model as transformers runs it by default: eager, SDPA attention."""
    config = AutoConfig.for_model(**dict(spec.config))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    reader = WeightReader(spec)
    infos = spec.tensors_for_stage(0, spec.num_layers)
    state = {info.name: reader.read(info, dtype) for info in infos}
    if spec.tie_word_embeddings and not spec.has_separate_head:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    model.train(mode=False)
    return model


def generate(
    model: PreTrainedModel, prompts: list[list[int]], new_tokens: int
) -> tuple[float, list[list[int]]]:
    """Greedy tokens for prompts of one length, and the seconds it took."""
    inputs = torch.tensor(prompts)
    started = time.perf_counter()
    output = model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - started, output[:, inputs.shape[1] :].tolist()


def main() -> None:
    """Serve requests until standard input ends."""
    dtype, threads, model_name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    model = load(load_model_spec(model_name), DTYPES[dtype])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds, tokens = generate(model, request["prompts"], request["new_tokens"])
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
