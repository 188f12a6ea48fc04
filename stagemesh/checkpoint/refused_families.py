"""Families that are not run, and why: known from `model_type` alone. Torch-free.

Everything else is found out when a stage is built. These are here because their configs and tensors
look so different that a reader would complain about a missing number or name instead.
"""

_RECURRENT = "its layers keep a recurrent state, which stages do not carry"
_ENCODER = "it is half of a model that reads its input with an encoder"
_MASKED = "it is a masked language model; stages cannot take its embeddings apart"
_PARTS = "it has several parts; only text models are supported"
_INDEXED = "its attention picks keys by an index that has a cache of its own"
_STREAMS = "its layers hand on several streams, or values beside the activation"

REFUSED_FAMILIES: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
            *("kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax"),
            *("nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
            *("qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma"),
            *("rwkv", "xlstm", "zamba", "zamba2", "zaya", "deepseek_v4", "inkling_text"),
            *("inkling2_text", "inkling2_loop_text"),
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"),
            *("musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr"),
            "whisper",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"),
            *("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
            *("roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        _MASKED,
    ),
    **dict.fromkeys(
        (
            *("blt", "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4"),
            *("gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2"),
            *("llama4", "mllama", "moshi", "moss_transcribe_diarize", "phi4_multimodal"),
        ),
        _PARTS,
    ),
    **dict.fromkeys(
        (*("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "minimax_m3_vl_text"),),
        _INDEXED,
    ),
    **dict.fromkeys(("hy_v4", "longcat_flash", "xlnet", "cpmant", "reformer"), _STREAMS),
    "gemma3n_text": "each layer adds embeddings of its own, and some share keys and values",
    "gemma4_text": "each layer adds embeddings of its own, and some share keys and values",
    "gemma4_unified_text": "some of its layers share keys and values",
    "jetmoe": "its attention picks experts for its heads, and keeps keys for each pick",
    "hrm_text": "it goes through its layers several times for one token",
    "hunyuan_v1_moe": "its router reads the weight of a layer, which may be packed for the kernels",
    "dory": "its files hold half a layer under each number",
}
"""By model type: why, as the second half of a sentence."""
