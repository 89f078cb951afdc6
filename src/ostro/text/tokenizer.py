"""A model's tokenizer: text to ids and back, and conversations to ids. Knows vocabularies and files; knows no weights.

encode        text ─────────────────────────────────────────────> ids
encode_chat   messages ─mark─> template ─> text ─markers known─> ids     (see control_text.py)
decode        ids ─> bytes ─> text                                       (see pieces.py)
"""

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, Unpack, cast

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import PostProcessor

from ostro.errors import BadCheckpoint, BadRequest, ModelError, ModelNotFound
from ostro.text.builtin_templates import CHOICES, choose_template
from ostro.text.chat import ChatTemplate, Message, RenderOptions
from ostro.text.control_text import ControlTexts
from ostro.text.guard import PlainEncoder, encode_ids, frame, guarded_texts
from ostro.text.library_panics import panics_become
from ostro.text.pairs import LatestText, PairEncoder, PairIds, PairPrompt
from ostro.text.pieces import PieceCodec, byte_level_bytes, codec_of
from ostro.text.renderer import Renderer
from ostro.text.tokenizer_limits import Growth, check_frame, check_size, check_words, declared_growth
from ostro.text.tokenizer_pace import Pace, measured_pace

_CACHED_WORDS = 10_000
"""The library's default."""


class ChatText(NamedTuple):
    """A rendered conversation; the mark precedes control texts that are not the template's own."""

    text: str
    mark: str


class Tokenizer:
    """Immutable and safe to share between threads. Use `load` to get one."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
        pieces: Sequence[str] | None = None,
    ) -> None:
        """`pieces`, by id, is needed only if the core does not know them all."""
        # A tokenizer.json may ask for these, and prompts would be silently truncated or padded.
        core.no_truncation()
        core.no_padding()
        self._growth = _bounded_growth(core)
        self._pace: Pace | None = None
        self._core, self._pairs = core, PairEncoder(core)
        self._source = "this model"
        self._added: dict[int, AddedToken] = core.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, added in self._added.items() if added.special)
        codec = codec_of(core.decoder)
        self.vocab_size = _vocab_size(core) if pieces is None else len(pieces)
        check_size(self.vocab_size)
        self._bytes = _TokenBytes(
            codec, core.id_to_token if pieces is None else pieces.__getitem__, self._added, self.vocab_size
        )
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        self.drops_first_space = codec.drops_first_space
        controls, self._guarded = guarded_texts(self._added.values(), chat_template)
        self._renderer = None if chat_template is None else Renderer(chat_template, controls, self._guarded)

    @classmethod
    def load(cls, path: Path, *, chat_template: str | None = None, eos_ids: Iterable[int] = ()) -> Self:
        """Loads from a model's directory or a .gguf file. `chat_template` names a built-in or a .jinja file. `eos_ids`
        are further end tokens: those that the model itself names, whose tokenizer may be another's.

        A tokenizer that cannot encode ordinary text fails here, not with the first request.
        """

        def unusable(panic: str) -> BadCheckpoint:
            return BadCheckpoint(
                f"The tokenizer of {path} cannot encode plain text ({panic}): its patterns are damaged or malicious. "
                "Download it again, or give another one with --tokenizer."
            )

        with panics_become(unusable), _half_pairs_refused(path):
            if path.is_file() and path.suffix == ".gguf":
                tokenizer = cls._load_gguf(path, chat_template)
            elif path.is_dir():
                tokenizer = cls._load_directory(path, chat_template)
            else:
                raise ModelNotFound(f"There is no model directory or .gguf file {path}.")
            with _uncached(tokenizer._core):
                # One at a time, so that at most one panics: each panic takes seconds.
                for probe in PROBES:
                    encode_ids(tokenizer._core, [probe], add_special=False)
                frame(tokenizer._core)
            tokenizer._pace = _measured_pace(tokenizer._core)
        tokenizer._source = str(path)
        tokenizer.eos_ids |= frozenset(eos_ids)
        return tokenizer

    @classmethod
    def _load_gguf(cls, path: Path, choice: str | None) -> Self:
        from ostro.formats.gguf_header import read_gguf_header
        from ostro.text.gguf_vocab import gguf_vocab

        vocab = gguf_vocab(read_gguf_header(path).metadata)
        template, turn_end = _template(
            choice, vocab.chat_template, vocab.tool_template, vocab.special_pieces, vocab.core
        )
        return cls(
            vocab.core,
            bos_id=vocab.bos_id,
            eos_ids=vocab.eos_ids | turn_end,
            chat_template=template,
            pieces=vocab.pieces,
        )

    @classmethod
    def _load_directory(cls, directory: Path, choice: str | None) -> Self:
        from ostro.text.hf_files import read_core, read_settings

        core = read_core(directory)
        settings = read_settings(directory, core)
        template, turn_end = _template(
            choice, settings.chat_template, settings.tool_template, settings.special_pieces, core
        )
        return cls(core, bos_id=settings.bos_id, eos_ids=settings.eos_ids | turn_end, chat_template=template)

    def start(self) -> None:
        """Starts the process that renders the chat template, so that the first conversation need not wait for it."""
        if self._renderer is not None:
            self._renderer.start()

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()

    # text -> ids

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> list[int]:
        """Without `allow_special`, special tokens that `text` spells out are encoded as plain text."""
        return self.encode_batch([text], add_special=add_special, allow_special=allow_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = True, allow_special: bool = True
    ) -> list[list[int]]:
        """Releases the GIL while it works."""
        for text in texts:
            self._check(text)
        with panics_become(self._gave_up):
            if not allow_special:
                return [self._plain.encode(text, add_special=add_special) for text in texts]
            return encode_ids(self._core, texts, add_special=add_special)

    def encode_start(self, text: str, most: int) -> list[int]:
        """As many of the text's first tokens as fit into `most`, with the special tokens at both ends."""
        self._check(text)
        with panics_become(self._gave_up):
            return self._pairs.start(text, most)

    def encode_pair(
        self, first: str, second: str, most: int | None = None, latest: LatestText | None = None
    ) -> PairIds:
        """Two texts for a model that reads them together; the longer one is shortened until both fit into `most`.
        `latest` is what several calls with the same first text have in common.
        """
        latest = latest or LatestText()
        for text in (second,) if latest.knows(first) else (first, second):
            self._check(text)
        with panics_become(self._gave_up):
            return self._pairs.pair(first, second, most, latest)

    def encode_prompted(self, prompt: PairPrompt, first: str, second: str) -> list[int]:
        """Two texts within a template's: markers in them stay text, as in `encode_chat`."""
        mark = secrets.token_hex(8)
        own = self._guarded.unmarked_texts("".join(prompt), mark)
        for way in (ControlTexts.marked, ControlTexts.marked_everywhere):
            inner = [way(self._guarded, text, mark) for text in (first, second)]
            text = f"{prompt.before}{inner[0]}{prompt.between}{inner[1]}{prompt.after}"
            # Otherwise the end of a text and what follows it would make a marker.
            if self._guarded.unmarked_texts(text, mark) == own:
                break
        return self.encode_rendered(ChatText(text, mark))

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> list[int]:
        """The template's markers become special tokens; the same texts in messages and tools stay text."""
        mark = secrets.token_hex(8)
        text = self.renderer.render(messages, mark=mark, **options)
        return self.encode_rendered(ChatText(text, mark))

    async def render_chat(
        self, messages: Sequence[Message], *, max_characters: int | None = None, **options: Unpack[RenderOptions]
    ) -> ChatText:
        """The first half of `encode_chat`, without blocking the event loop; `encode_rendered` is the second."""
        mark = secrets.token_hex(8)
        text = await self.renderer.render_async(messages, mark=mark, max_characters=max_characters, **options)
        return ChatText(text, mark)

    def encode_rendered(self, chat: ChatText) -> list[int]:
        if chat.mark not in chat.text:
            return self.encode(chat.text, add_special=False)
        self._check(chat.text)
        with panics_become(self._gave_up):
            return self._plain.encode_marked(chat.text, chat.mark)

    @property
    def renderer(self) -> Renderer:
        """The chat template's renderer; raises BadRequest if there is no template."""
        if self._renderer is None:
            raise BadRequest(
                "This model has no chat template, and its special tokens match none of the built-in ones. "
                f"Set chat_template to {CHOICES}, or send a plain prompt.",
                param="messages",
            )
        return self._renderer

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are not text, such as chat templates' markers."""
        return self._special_ids

    @cached_property
    def num_closing(self) -> int:
        """How many special tokens it appends to a text, as BERT's do."""
        return len(frame(self._core)[1])

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the text's tokens, without tokenising it. 0 if nothing is certain."""
        if self._span is None:
            return 0
        longest, vanishing = self._span
        return -(-(len(text) - sum(map(text.count, vanishing))) // longest)

    @cached_property
    def _span(self) -> tuple[int, list[str]] | None:
        """Most characters per token, and the characters that no token covers. None if text may shrink in other ways."""
        swallows = any(added.lstrip or added.rstrip for added in self._added.values())
        if self._core.normalizer is not None or swallows or not _is_byte_level(self._core):
            return None
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        missing = [byte_level_bytes(letter)[0] for letter in alphabet if self._core.token_to_id(letter) is None]
        if any(0x80 <= byte < 0xC0 for byte in missing):
            return None
        # Every non-ASCII character has such a byte. A piece has one letter per byte, so at least one per character.
        return max(map(len, self._core.get_vocab())), [chr(byte) for byte in missing if byte < 0x80]

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens within a text, with and without a leading space."""
        texts = [space + word for word in words for space in ("", " ")]
        # After a newline a word is encoded as in mid-text; at a text's start, some vocabularies add a space.
        [newline, *after_newline] = self.encode_batch(["\n", *("\n" + text for text in texts)], add_special=False)
        alone = self.encode_batch(texts, add_special=False)
        found = (
            tuple(ids[len(newline) :] if ids[: len(newline)] == newline else bare)
            for ids, bare in zip(after_newline, alone, strict=True)
        )
        return tuple(ids for ids in dict.fromkeys(found) if ids)

    # ids -> text

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        data = self.bytes_of(ids, skip_special=skip_special)
        return (data.removeprefix(b" ") if self.drops_first_space else data).decode(errors="replace")

    def bytes_of(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """The ids' bytes in mid-text: does not drop the first space, as `decode` may."""
        if skip_special:
            ids = [token for token in ids if token not in self._special_ids]
        return b"".join(map(self._bytes.__getitem__, ids))

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text, if there is one."""
        token = self._core.token_to_id(text)
        return token if token in self._special_ids else None

    def token_bytes(self, id: int) -> bytes:
        """The token's exact bytes. Empty for an id outside the vocabulary (the logits may be wider)."""
        return self._bytes[id]

    def token_text(self, id: int) -> str:
        """The token's own text, also of special tokens; incomplete characters are replaced."""
        return self._bytes[id].decode(errors="replace")

    def _check(self, text: str) -> None:
        """Raises BadRequest for a text that the tokenizer would make too long, or take too long over."""
        self._growth.check(text)
        if self._pace is not None:
            self._pace.check(text)

    def _gave_up(self, panic: str) -> ModelError:
        return ModelError(
            f"The tokenizer of {self._source} gave up on this text ({panic}). Send it in shorter pieces, or serve the "
            "model with another tokenizer."
        )

    @cached_property
    def _plain(self) -> PlainEncoder:
        # Made on first use: most texts hold no special tokens. Two threads may both make one; either will do.
        return PlainEncoder(self._core, self._added, self._guarded)


@contextmanager
def _half_pairs_refused(path: Path) -> Iterator[None]:
    """Raises BadCheckpoint for half a surrogate pair, which JSON can spell and Python keeps but UTF-8 cannot encode."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise BadCheckpoint(
            f"The tokenizer or the chat template of {path} holds half a surrogate pair "
            f"({error.object[error.start]!a}), which is not a character. Download the files again, or choose others "
            "with --tokenizer or --chat-template."
        ) from error


class _TokenBytes(dict[int, bytes]):
    """Id -> bytes, computed on first access: loading stays fast, and later lookups are a dictionary's."""

    def __init__(
        self,
        codec: PieceCodec,
        piece_of: Callable[[int], str | None],
        added: Mapping[int, AddedToken],
        vocab_size: int,
    ) -> None:
        super().__init__({token: codec.added_to_bytes(entry.content) for token, entry in added.items()})
        self._to_bytes, self._piece_of, self._vocab_size = codec.to_bytes, piece_of, vocab_size

    def __missing__(self, token: int) -> bytes:
        piece = self._piece_of(token) if 0 <= token < self._vocab_size else None
        if piece is None:
            return b""
        self[token] = data = self._to_bytes(piece)
        return data


def _vocab_size(core: tokenizers.Tokenizer) -> int:
    """One more than the highest id."""
    count: int = core.get_vocab_size()
    if count and core.id_to_token(count - 1) is not None and core.id_to_token(count) is None:
        return count
    return max(core.get_vocab().values(), default=-1) + 1


def _bounded_growth(core: tokenizers.Tokenizer) -> Growth:
    """How much longer it may make a text. Raises BadCheckpoint for a tokenizer whose work has no bound."""
    check_frame(_declaration(core.post_processor), max(map(core.num_special_tokens_to_add, (False, True))))
    model = core.model
    pieces = core.get_vocab(with_added_tokens=False) if isinstance(model, models.Unigram) else ()
    check_words(
        getattr(model, "max_input_chars_per_word", 0),
        max(map(len, pieces), default=0),
        getattr(model, "continuing_subword_prefix", None),
        getattr(model, "end_of_word_suffix", None),
    )
    return declared_growth(_declaration(core.normalizer), _declaration(core.pre_tokenizer))


def _measured_pace(core: tokenizers.Tokenizer) -> Pace:
    return measured_pace(core, _declaration(core.normalizer), _declaration(core.pre_tokenizer))


def _declaration(part: Normalizer | PreTokenizer | PostProcessor | None) -> object:
    """A part of the tokenizer as in a tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


_KEEPING_SPLITS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def _is_byte_level(core: tokenizers.Tokenizer) -> bool:
    """Whether it is a byte-level BPE that splits texts without dropping anything."""
    rule = cast(dict[str, Any], _declaration(core.pre_tokenizer) or {})
    steps = rule.get("pretokenizers", [rule])
    kinds = [step.get("type") for step in steps]
    keeps = all(kind != "Split" or step["behavior"] in _KEEPING_SPLITS for kind, step in zip(kinds, steps, strict=True))
    known = {"ByteLevel", "Digits", "Split"}
    return isinstance(core.model, models.BPE) and keeps and known >= {*kinds} and "ByteLevel" in kinds


def _template(
    choice: str | None,
    own: str | None,
    own_for_tools: str | None,
    variables: Mapping[str, str],
    core: tokenizers.Tokenizer,
) -> tuple[ChatTemplate | None, frozenset[int]]:
    """The template, and the token that ends a turn if the template is a built-in one."""
    chosen = choose_template(choice, own, variables, lambda token: core.token_to_id(token) is not None, own_for_tools)
    token = None if chosen.turn_end is None else core.token_to_id(chosen.turn_end)
    return chosen.template, frozenset() if token is None else frozenset({token})


@contextmanager
def _uncached(core: tokenizers.Tokenizer) -> Iterator[None]:
    """Keeps the words of the block out of the thread's cache, which the library never empties: a thread that has loaded
    many models would hold some of each. Texts of requests are encoded by threads that end with their model.
    """
    resize = getattr(core.model, "_resize_cache", lambda capacity: None)
    resize(0)
    try:
        yield
    finally:
        resize(_CACHED_WORDS)


# Nested repetitions in a pattern backtrack on these: one character many times, then another.
PROBES = tuple(
    before + kind * 64 + after for before in ("", "x ") for kind in "a1 _!\n\té中" for after in ("", "!", "\x00", " b")
)
"""Texts that every sound tokenizer can encode. They take well under a millisecond together."""
