"""Two texts as one input: the ids that encoders take, shortened at their ends with special tokens kept, and the prompt
that asks a language model about both.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, Unpack

import tokenizers

from ostro.errors import BadRequest, UnsupportedModel
from ostro.text.chat import Message, RenderOptions
from ostro.text.renderer import Renderer

# Any text of at least one token.
_STAND_IN = "a"


class PairIds(NamedTuple):
    ids: list[int]
    second_at: int
    """Position where the second text begins, for a model that tells the two apart; 0 if its tokenizer does not."""


class LatestText:
    """The ids of the text that was encoded last: the same query often comes with many documents. One per request:
    requests with other queries are encoded in turns with it, and each would replace a common one's.
    """

    def __init__(self) -> None:
        self._known: tuple[str, list[int]] | None = None

    def knows(self, text: str) -> bool:
        return self._known is not None and self._known[0] == text

    def ids(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        if self._known is None or self._known[0] != text:
            self._known = text, encode(text)
        return self._known[1]


class PairEncoder:
    """Encodes one text, or two that the tokenizer joins.

    The library would shorten texts itself, but it keeps what it cuts off, and joins every piece of one text with each
    of the other. Here lists of ids are cut, and put between the special tokens that the library puts around a short
    text.
    """

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core

    def start(self, text: str, most: int) -> list[int]:
        """As many of the text's first tokens as fit into `most`, special tokens included."""
        room = self._room(most, of_pair=False)
        return self._joined([self._ids(text)[:room]]).ids

    def pair(self, first: str, second: str, most: int | None, latest: LatestText) -> PairIds:
        """With `most`, the longer text is shortened until both fit, as transformers does by default."""
        texts = [latest.ids(first, self._ids), self._ids(second)]
        if most is not None:
            shares = _shares(len(texts[0]), len(texts[1]), self._room(most, of_pair=True))
            texts = [ids[:kept] for ids, kept in zip(texts, shares, strict=True)]
        return self._joined(texts)

    def _ids(self, text: str) -> list[int]:
        try:
            # Unlike the library's single `encode`, this releases the GIL.
            [encoding] = self._core.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise BadRequest("The text holds half a surrogate pair, which is not a character.") from error
        ids: list[int] = encoding.ids
        return ids

    def _room(self, most: int, *, of_pair: bool) -> int:
        special = self._core.num_special_tokens_to_add(of_pair)
        if most <= special:
            raise BadRequest(
                f"truncate_prompt_tokens leaves {most} tokens, but {special} are special ones: raise it.",
                param="truncate_prompt_tokens",
            )
        return most - special

    def _joined(self, texts: Sequence[list[int]]) -> PairIds:
        short = self._core.encode_batch_fast([_STAND_IN] * len(texts), add_special_tokens=False)
        like = self._core.post_process(short[0], short[1] if len(short) > 1 else None, True)
        # The stand-ins' tokens, in order, are to be replaced by the texts.
        begins = {0: texts[0], len(short[0]): texts[-1] if len(texts) > 1 else []}
        ids: list[int] = []
        second_at = number = 0
        for id, type, is_special in zip(like.ids, like.type_ids, like.special_tokens_mask, strict=True):
            if type == 1 and not second_at:
                second_at = len(ids)
            if is_special:
                ids.append(id)
            else:
                ids += begins.get(number, [])
                number += 1
        return PairIds(ids, second_at)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text to keep: all of the shorter one, unless both are longer than half the room."""
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


class PairPrompt(NamedTuple):
    """The text that a chat template puts around two texts, so that it need not run for each pair of them: before QUERY
    between DOCUMENT after.
    """

    before: str
    between: str
    after: str


def pair_prompt(
    renderer: Renderer, messages: Callable[[str, str], Sequence[Message]], **options: Unpack[RenderOptions]
) -> PairPrompt:
    """`messages` makes a conversation of two texts. Raises UnsupportedModel for a template that shows one of them
    changed, more than once or not at all, or the second before the first. Blocks on the process that renders.
    """
    # The spaces show whether the template strips texts.
    first, second = (f" {secrets.token_hex(8)} " for _ in range(2))
    text = renderer.render(messages(first, second), **options)
    if text.count(first.strip()) != 1 or text.count(second.strip()) != 1:
        raise UnsupportedModel("Its chat template does not show a query and a document once each, as ranking needs.")
    before, found, rest = text.partition(first)
    between, also_found, after = rest.partition(second)
    if not found or not also_found:
        raise UnsupportedModel("Its chat template changes a query or a document, or shows the document first.")
    return PairPrompt(before, between, after)
