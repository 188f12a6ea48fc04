"""How byte-level vocabularies cut text before merging, by the name that a GGUF file gives.

A GGUF names its rule (tokenizer.ggml.pre) and does not hold it. The rules are those of the
tokenizer.json files that such files are made from; names are llama.cpp's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers

_LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CUT = _LLAMA3_CUT.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_CUT = _QWEN2_CUT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_CUT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_CUT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3_CUT = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM_CUT = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"

_Step = Callable[[], pre_tokenizers.PreTokenizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRule:
    """How a byte-level vocabulary cuts text before merging."""

    steps: tuple[_Step, ...] = ()
    """Cuts before the byte-level step."""
    uses_gpt2_regex: bool = True
    """The byte-level step also cuts as GPT-2 does."""
    later_steps: tuple[_Step, ...] = ()
    """Cuts after the byte-level step."""
    ignores_merges: bool = False
    """A piece that is a token as a whole is taken without merging."""
    composes_unicode: bool = False
    """Text is brought to Unicode's composed form (NFC) first."""
    adds_bos: bool = False
    """Prompts start with BOS unless the file says otherwise."""


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=False)


def _punctuation() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Punctuation(behavior="contiguous")


def _by(pattern: str) -> _Step:
    return lambda: pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _rule(*patterns: str, whole: bool = False, bos: bool = False, nfc: bool = False) -> CutRule:
    return CutRule(
        steps=tuple(_by(pattern) for pattern in patterns),
        uses_gpt2_regex=False,
        ignores_merges=whole,
        adds_bos=bos,
        composes_unicode=nfc,
    )


_GPT2 = CutRule()
_SMOLLM = CutRule(steps=(_single_digits,))
_LLAMA3 = _rule(_LLAMA3_CUT, whole=True, bos=True)
_LLAMA3_MERGED = _rule(_LLAMA3_CUT)
_QWEN2 = _rule(_QWEN2_CUT, nfc=True)
_GPT4O = _rule(_GPT4O_CUT)
_FALCON = CutRule(
    steps=(_punctuation,),
    later_steps=(_digits, _by("[0-9][0-9][0-9]")),
)

CUT_RULES: Mapping[str, CutRule] = MappingProxyType(
    {
        **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"), _GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r"), _SMOLLM),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _LLAMA3),
        **dict.fromkeys(("lfm2", "midm-2.0", "pixtral"), _LLAMA3),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3_MERGED),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "f2llmv2"), _QWEN2),
        "stablelm2": _rule(_QWEN2_CUT),
        "qwen35": _rule(_QWEN35_CUT, nfc=True),
        "tekken": _rule(_TEKKEN_CUT, whole=True, bos=True),
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
        "deepseek-coder": _rule("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"),
        "deepseek-v3": _rule(
            r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_CUT
        ),
        "falcon": _FALCON,
        "bloom": _rule(_BLOOM_CUT),
    }
)
"""By the value of tokenizer.ggml.pre."""
