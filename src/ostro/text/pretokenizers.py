"""Pre-tokenizers: how byte-level vocabularies split text into words before merging, by their names in GGUF files
(`tokenizer.ggml.pre`).

Each is a list of patterns; each pattern splits what the ones before it left whole, and both its matches and the text
between them are kept. A wrong one gives wrong tokens without any error, so an unknown name is refused.
"""

from dataclasses import dataclass, replace

from ostro.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a word that is itself a token is used as such, even if no merges lead to it."""
    add_bos: bool = False
    """Default of `add_bos_token`, for files without it."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4_words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(suffix: str, digits: str) -> str:
    """Words that also end where lower case turns to upper: HelloWorld is two."""
    head = r"[^\r\n\p{L}\p{N}]?"
    word = rf"{head}{_UPPER}*{_LOWER}+{suffix}|{head}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


# Letters of scripts with case, as DeepSeek's first tokenizer lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK3_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)
_BLOOM_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"

_GPT2 = PreTokenizer((_GPT2_WORDS,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2_WORDS))
_LLAMA3 = PreTokenizer((_gpt4_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_GPT4 = PreTokenizer(_LLAMA3.patterns)
_QWEN2 = PreTokenizer((_gpt4_words(_DIGIT),))
_GPT4O = PreTokenizer((_cased_words(_CONTRACTIONS + "?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3_WORDS))
_BLOOM = PreTokenizer((_BLOOM_WORDS,))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_TINY_AYA = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _SINGLE_DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _GPT4),
    **dict.fromkeys(("glm4", "glm5"), replace(_GPT4, ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"), _QWEN2),
    "kormo": _QWEN2,
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        )
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "tekken": PreTokenizer((_cased_words("", _DIGIT),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenizer((_BLOOM_WORDS, _DIGIT)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _gpt4_words(r"\p{N}+")), ignore_merges=True),
}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedModel(
            f"The GGUF file names the unknown pre-tokenizer {name!r} (tokenizer.ggml.pre), and another one would give "
            "wrong tokens. Use the model's original files, with their tokenizer.json."
        ) from None
