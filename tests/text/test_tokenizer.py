"""Loading, encoding and decoding, held to the libraries the vocabularies come from."""

import json
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from text_vocabs import (
    bert_directory,
    byte_level,
    byte_level_core,
    control_ids,
    default_model,
    model_directory,
    sentencepiece_like,
    smollm,
    word_piece_core,
)
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ostro.errors import BadCheckpoint, BadRequest, ModelNotFound, UnsupportedModel
from ostro.text.builtin_templates import BUILTIN_TEMPLATES
from ostro.text.gguf_vocab import gguf_vocab
from ostro.text.tokenizer import Tokenizer
from ostro.weights import read_gguf_header

MIXED_TEXTS = [
    "",
    "Hello, world!",
    "In 1984 there were 12345678 of 3.14159; ١٢٣ and ½ and Ⅷ.",
    "  two   spaces \t tabs\n\n\n lines \r\n end   ",
    "def f(x):\n    return {'a': [x ** 2, not x]}  # don't I'LL they've",
    "🙂👍🏽 👨‍👩‍👧‍👦 e\u0301 ﷽",
    "日本語のテキスト、中文文本。한국어 텍스트",
    "اللغة العربية ١٢٣ עברית हिन्दी",
]


def test_directory_gives_vocabulary_ends_and_template() -> None:
    end, turn_end = control_ids()
    assert byte_level().vocab_size == byte_level_core().get_vocab_size()
    assert byte_level().bos_id == end
    assert byte_level().eos_ids == {end, turn_end}
    assert byte_level().chat_template is not None


@given(st.text(max_size=50))
def test_text_survives_encoding_and_decoding(text: str) -> None:
    assert byte_level().decode(byte_level().encode(text, allow_special=False)) == text


@given(data=st.data(), skip_special=st.booleans())
def test_byte_level_decoding_is_the_librarys_own(data: st.DataObject, skip_special: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level().vocab_size - 1), max_size=30))
    assert byte_level().decode(ids, skip_special=skip_special) == byte_level_core().decode(
        ids, skip_special_tokens=skip_special
    )


def test_token_bytes_are_exact_and_token_text_is_lossy() -> None:
    ids = byte_level().encode("𝄞", add_special=False)
    assert b"".join(map(byte_level().token_bytes, ids)) == "𝄞".encode()
    assert "\ufffd" in byte_level().token_text(ids[0])
    assert byte_level().token_text(byte_level().encode("<|im_end|>", add_special=False)[0]) == "<|im_end|>"


def test_special_text_is_text_unless_allowed() -> None:
    text = "a<|im_end|><think>   b"
    special = set(byte_level().encode("<|im_end|>", add_special=False))
    assert special <= set(byte_level().encode(text))
    plain = byte_level().encode(text, allow_special=False)
    assert special.isdisjoint(plain)
    assert byte_level().decode(plain) == text
    assert plain[0] == byte_level().encode(text)[0] == byte_level().bos_id


@given(st.text(max_size=30))
def test_ordinary_text_is_encoded_alike_with_and_without_special_tokens_allowed(text: str) -> None:
    assert byte_level().encode(text) == byte_level().encode(text, allow_special=False)


@pytest.mark.parametrize("allow_special", [True, False])
def test_half_a_surrogate_pair_is_refused(allow_special: bool) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        byte_level().encode("a\ud800", allow_special=allow_special)


def test_batch_is_each_text_alone() -> None:
    assert byte_level().encode_batch(MIXED_TEXTS, add_special=False) == [
        byte_level().encode(text, add_special=False) for text in MIXED_TEXTS
    ]


@pytest.mark.full
def test_encoding_a_long_text_lets_other_threads_run() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    worker = threading.Thread(target=byte_level().encode, args=(text,))
    num_turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        num_turns += 1
    # Kept waiting, this thread would have one turn before the encoding and one after it.
    assert num_turns > 5


def test_bad_words_are_banned_with_and_without_a_space_before() -> None:
    for tokenizer in (byte_level(), sentencepiece_like()):
        variants = tokenizer.bad_word_ids(["dog"])
        assert {tokenizer.bytes_of(ids).decode() for ids in variants} == {"dog", " dog"}
    assert byte_level().bad_word_ids(["\n"])
    assert byte_level().bad_word_ids([]) == ()


def test_truncation_and_padding_in_the_file_are_not_obeyed(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(model_directory() / "tokenizer.json"))
    core.enable_truncation(4)
    core.enable_padding(length=64)
    core.save(str(tmp_path / "tokenizer.json"))
    text = "a text of more than four tokens"
    assert Tokenizer.load(tmp_path).encode(text) == byte_level().encode(text)


def test_template_file_wins_over_the_one_in_the_config(tmp_path: Path) -> None:
    directory = shutil.copytree(model_directory(), tmp_path / "model")
    (directory / "chat_template.jinja").write_text("file")
    template = Tokenizer.load(directory).chat_template
    assert template is not None
    assert template.source == "file"


def test_default_template_is_chosen_among_several_named_ones(tmp_path: Path) -> None:
    directory = shutil.copytree(model_directory(), tmp_path / "model")
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = Tokenizer.load(directory).chat_template
    assert template is not None
    assert template.source == "d"


@pytest.mark.parametrize("in_file", [False, True])
def test_conversation_with_tools_goes_by_the_template_for_tools(tmp_path: Path, in_file: bool) -> None:
    directory = shutil.copytree(model_directory(), tmp_path / "model")
    named = [{"name": "default", "template": "plain"}]
    if in_file:
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }} tools")
    else:
        named.append({"name": "tool_use", "template": "{{ tools }} tools"})
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with closing(Tokenizer.load(directory)) as tokenizer:
        renderer = tokenizer.renderer
        hello = {"role": "user", "content": "Hi"}
        assert renderer.render([hello]) == "plain"
        assert renderer.render([hello], tools=[{"a": 1}]) == "[{'a': 1}] tools"
        assert renderer.render([hello, {"role": "tool", "content": "1"}]) == "None tools"
        assert renderer.render([{"role": "assistant", "content": "", "tool_calls": [{}]}]) == "None tools"


def test_ends_come_from_the_model_config_where_no_other_file_names_them(tmp_path: Path) -> None:
    shutil.copy(model_directory() / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "bos_token_id": 5}))
    _, turn_end = control_ids()
    tokenizer = Tokenizer.load(tmp_path)
    # The turn's end is that of the built-in format that its tokens identify.
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (5, frozenset({7, turn_end}))


def test_sentencepiece_file_alone_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        Tokenizer.load(tmp_path)


def test_missing_tokenizer_is_distinguished_from_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelNotFound, match="no model directory"):
        Tokenizer.load(tmp_path / "nowhere")


def test_damaged_tokenizer_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_vocabulary_with_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    core.decoder = decoders.CTC()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="the decoder CTC"):
        Tokenizer.load(tmp_path)


BERT_TEXTS = ["The quick fox.", "she sells shells, doesn't she?  I'm sure!", "unknown: Ω ž", "a\nb"]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("text", BERT_TEXTS)
def test_word_pieces_are_encoded_and_decoded_as_by_the_library(older: bool, text: str) -> None:
    core, tokenizer = word_piece_core(), Tokenizer.load(bert_directory(older=older))
    ids = tokenizer.encode(text)
    assert ids == core.encode(text).ids
    assert tokenizer.encode(text, allow_special=False) == ids
    assert tokenizer.decode(ids) == core.decode(ids)
    whole = "".join(tokenizer.bytes_of([token]).decode() for token in ids)
    assert whole.removeprefix(" ") == core.decode(ids)


@pytest.mark.parametrize("older", [False, True])
def test_a_separator_ends_a_text_of_word_pieces(older: bool) -> None:
    tokenizer, core = Tokenizer.load(bert_directory(older=older)), word_piece_core()
    assert tokenizer.eos_ids == {core.token_to_id("[SEP]")}
    assert tokenizer.num_closing == 1
    assert Tokenizer.load(model_directory()).num_closing == 0


def test_a_vocabulary_that_is_not_berts_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UnsupportedModel, match=r"vocab\.txt has no \[UNK\], .*AutoTokenizer"):
        Tokenizer.load(tmp_path)


def test_chosen_template_must_fit_the_vocabulary() -> None:
    with pytest.raises(BadRequest, match=r"start_header_id.*Set chat_template"):
        Tokenizer.load(model_directory(), chat_template="llama3")
    with pytest.raises(BadRequest, match="generic or the path"):
        Tokenizer.load(model_directory(), chat_template="alpaca")


@pytest.mark.parametrize("name", ["chat_template", "bos_token", "pad_token"])
def test_half_a_surrogate_pair_is_refused_when_the_model_is_loaded(name: str, tmp_path: Path) -> None:
    """It came to light as a UnicodeEncodeError, in the first conversation."""
    shutil.copy(model_directory() / "tokenizer.json", tmp_path)
    settings = {"chat_template": "{{ messages[0].content }}", name: "a\ud800"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(BadCheckpoint, match=r"half a surrogate pair \('\\ud800'\).*--chat-template"):
        Tokenizer.load(tmp_path)


def test_chosen_template_wins_over_the_models_own_and_its_turn_end_ends_generation(tmp_path: Path) -> None:
    shutil.copy(model_directory() / "tokenizer.json", tmp_path)
    chatml = Tokenizer.load(tmp_path, chat_template="chatml")
    assert chatml.eos_ids == set(byte_level().encode("<|im_end|>", add_special=False))
    own_file = tmp_path / "own.jinja"
    own_file.write_text("mine")
    chosen = Tokenizer.load(model_directory(), chat_template=str(own_file))
    assert chosen.decode(chosen.encode_chat([{"role": "user", "content": "x"}])) == "mine"


def bare_core() -> tokenizers.Tokenizer:
    """Bytes and no special tokens."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


@pytest.mark.parametrize(
    ("markers", "eos", "name"),
    [
        (["<|im_start|>", "<|im_end|>"], "<|im_end|>", "chatml"),
        (["<start_of_turn>", "<end_of_turn>"], "<eos>", "gemma"),
        (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|end_of_text|>", "llama3"),
        (["[INST]", "[/INST]", "</s>"], "</s>", "mistral"),
        # One that was trained on in another format has the tokens of both, and ends its texts by the later one's.
        (
            ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"],
            "<|eot_id|>",
            "llama3",
        ),
    ],
)
def test_a_model_without_a_template_gets_the_one_that_its_tokens_identify(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, markers: list[str], eos: str, name: str
) -> None:
    core = bare_core()
    core.add_special_tokens([*markers, "<s>", eos])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": eos}))
    with caplog.at_level("INFO", "ostro"):
        tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.source == BUILTIN_TEMPLATES[name].source
    turn_end = BUILTIN_TEMPLATES[name].turn_end
    assert turn_end is not None
    assert tokenizer.eos_ids == {core.token_to_id(eos), core.token_to_id(turn_end)}
    [line] = caplog.messages
    assert f"its special tokens are those of {name}," in line


def test_a_model_whose_tokens_identify_no_template_says_what_to_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = bare_core()
    core.add_special_tokens(["<|endoftext|>", "<|im_end|>", "[INST]"])
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(BadRequest, match=r"no chat template.*Set chat_template to chatml, gemma, llama3, mistral"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert not caplog.messages


def test_default_models_tokens_are_those_of_its_original_rules() -> None:
    """The converted vocabulary once lost its digit splitter: numbers came out as tokens the model had never seen."""
    original = tokenizers.Tokenizer(gguf_vocab(read_gguf_header(default_model()).metadata).core.model)
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in MIXED_TEXTS:
        ids = smollm().encode(text)
        assert ids == original.encode(text).ids
        assert smollm().decode(ids) == text


def test_default_model_begins_turns_with_single_tokens() -> None:
    ids = smollm().encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count: 123"}])
    assert smollm().eos_ids == {2}
    assert smollm().vocab_size == 49152
    assert ids.count(1) == 3
    assert smollm().decode(ids, skip_special=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCount: 123<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [smollm().token_text(token) for token in ids[ids.index(216) :][:4]] == [" ", "1", "2", "3"]


@given(st.text(max_size=200) | st.text(" \n-=\x04\x16\U000f0000", max_size=200))
def test_text_has_at_least_the_predicted_number_of_tokens(text: str) -> None:
    """The default vocabulary has no token for some control characters: a text of them has none at all."""
    for tokenizer in (byte_level(), smollm()):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special=False))


def test_lower_bound_on_tokens_grows_with_the_text() -> None:
    longest = max(map(len, byte_level_core().get_vocab()))
    assert [byte_level().fewest_tokens("a" * length) for length in (0, 1, longest, longest + 1)] == [0, 1, 1, 2]
    assert smollm().fewest_tokens("a" * 1_000_000) > 10_000


def core_with(pre_tokenizer: pre_tokenizers.PreTokenizer | None = None, **added: bool) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer.from_str(byte_level_core().to_str())
    if pre_tokenizer is not None:
        core.pre_tokenizer = pre_tokenizer
    core.add_tokens([AddedToken("<extra>", **added)])
    return core


def shrinking_cores() -> dict[str, tokenizers.Tokenizer]:
    removing = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    normalising = core_with()
    normalising.normalizer = tokenizers.normalizers.Strip()
    return {
        "lstrip": core_with(lstrip=True),
        "rstrip": core_with(rstrip=True),
        "white space": core_with(pre_tokenizers.Whitespace()),
        "removed": core_with(pre_tokenizers.Sequence(removing)),
        "normaliser": normalising,
    }


def test_nothing_is_said_of_texts_that_may_shrink() -> None:
    assert Tokenizer(core_with()).fewest_tokens("a" * 1000) > 0
    assert {
        name: Tokenizer(core).fewest_tokens("a" * 1000) for name, core in shrinking_cores().items()
    } == dict.fromkeys(shrinking_cores(), 0)
    assert sentencepiece_like().fewest_tokens("a" * 1000) == 0
