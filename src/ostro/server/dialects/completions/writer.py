"""Writes completions of one or several prompts: as stream events, or as a whole. Knows no sockets."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Final, TypedDict

from ostro.engine.runner import TokenLogprob
from ostro.frontend.outputs import Choice, Completion, Delta
from ostro.schemas.completions import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse
from ostro.schemas.generation import FinishReason
from ostro.server.dialects.completions.framing import DIALECT
from ostro.server.dialects.openai import LOWEST_LOGPROB, Envelope, finish_reason, finite, prompt_logprobs, usage
from ostro.server.dialects.writing import new_id
from ostro.text.offsets import text_offsets
from ostro.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class _Chunk(TypedDict):
    """The choice in the middle of an event."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionWriter:
    framing: Final = DIALECT

    def __init__(
        self,
        request: CompletionRequest,
        completions: Sequence[Completion],
        tokenizer: Tokenizer,
        *,
        model: str,
        strict: bool = False,
    ) -> None:
        """`completions` has one per prompt, in order."""
        self.id = new_id("cmpl-")
        self._completions = completions
        self._envelope = Envelope(self.id, "text_completion", completions, request.stream_options, model=model)
        self._choices = [
            [
                _ChoiceWriter(request, number, completion, choice, tokenizer, strict=strict)
                for choice in completion.choices
            ]
            for number, completion in enumerate(completions)
        ]

    def start(self) -> bytes:
        return b""

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        choices = self._choices[number]
        return b"".join(
            self._envelope.choice(chunk) for delta in deltas if (chunk := choices[delta.index].of(delta)) is not None
        )

    def end(self) -> bytes:
        return self._envelope.usage()

    def whole(self) -> CompletionResponse:
        return CompletionResponse(
            id=self.id,
            created=self._envelope.created,
            model=self._envelope.model,
            choices=[choice.whole() for choices in self._choices for choice in choices],
            usage=usage(self._completions),
        )


class _ChoiceWriter:
    """One choice of a completion: whether its prompt has been echoed, and the text offset of its next token."""

    def __init__(
        self,
        request: CompletionRequest,
        number: int,
        completion: Completion,
        choice: Choice,
        tokenizer: Tokenizer,
        *,
        strict: bool,
    ) -> None:
        """`number` is the index of the prompt."""
        self._strict = strict
        self._top = request.logprobs
        self._top_of_prompt = request.prompt_logprobs
        self._completion = completion
        self._choice = choice
        self._tokenizer = tokenizer
        self._index = number * request.n + choice.index
        self._echo = _echoed_prompt(request, number, completion, tokenizer) if request.echo else None
        self._base = self._at = len(self._echo or "")
        self._skip_special = request.skip_special_tokens
        self._decoder = _Utf8Decoder(errors="replace")

    def of(self, delta: Delta) -> _Chunk | None:
        """The choice's part of an event; None if there is nothing to report."""
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return None
        return self._chunk(delta, () if self._top is None else self._offsets(delta))

    def whole(self) -> CompletionChoice:
        """The choice as one chunk. Its offsets are exact: all of its text is known."""
        delta = self._choice.as_delta()
        offsets = () if self._top is None else text_offsets(delta.token_ids, delta.text, self._tokenizer)
        chunk = self._chunk(delta, [self._base + offset for offset in offsets])
        reason = chunk["finish_reason"]
        assert reason is not None, "the choice has ended"
        return CompletionChoice(
            index=self._index,
            text=chunk["text"],
            logprobs=chunk["logprobs"],
            finish_reason=reason,
            prompt_logprobs=prompt_logprobs(self._top_of_prompt, self._completion, self._tokenizer),
        )

    def _chunk(self, delta: Delta, offsets: Sequence[int]) -> _Chunk:
        """`offsets` are those of the delta's tokens, if log-probabilities are wanted."""
        reason = None if delta.finish_reason is None else finish_reason(self._choice, strict=self._strict)
        text = delta.text
        ids: Sequence[int] = delta.token_ids
        entries: Sequence[TokenLogprob | None] = delta.logprobs or ()
        if self._echo is not None:
            # All of the prompt's log-probabilities are known before the first text.
            prompt = self._completion
            ids = [*prompt.prompt_ids, *ids]
            entries = [*(prompt.prompt_logprobs or ()), *entries]
            offsets = [*text_offsets(prompt.prompt_ids, self._echo, self._tokenizer), *offsets]
            text = self._echo + text
            self._echo = None
        logprobs = None if self._top is None else _token_arrays(self._top, ids, entries, offsets, self._tokenizer)
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _offsets(self, delta: Delta) -> list[int]:
        """Text offsets of the tokens. Those that a stop string has cut off get the offset of the end."""
        offsets = [self._advance(token) for token in delta.token_ids]
        if delta.finish_reason is None:
            return offsets
        end = self._base + len(self._choice.text)
        return [min(at, end) for at in offsets]

    def _advance(self, token: int) -> int:
        at = self._at
        self._at += len(self._decoder.decode(self._tokenizer.bytes_of((token,), skip_special=self._skip_special)))
        return at


def _echoed_prompt(request: CompletionRequest, number: int, completion: Completion, tokenizer: Tokenizer) -> str:
    """A prompt's text, to be put before its choices. If it may be truncated, only the part that was kept."""
    prompt = request.prompt[number]
    if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
        return prompt
    return tokenizer.decode(completion.prompt_ids, skip_special=request.skip_special_tokens)


def _token_arrays(
    top: int,
    ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    tokenizer: Tokenizer,
) -> CompletionLogprobs:
    """The parallel arrays for consecutive tokens, including one that ended the text and is not part of it."""
    return CompletionLogprobs(
        tokens=[_token_name(token, tokenizer) for token in ids],
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in entries],
        top_logprobs=[_alternatives(entry, top, tokenizer) for entry in entries] if top else None,
        text_offset=list(offsets),
    )


def _alternatives(entry: TokenLogprob | None, top: int, tokenizer: Tokenizer) -> dict[str, float] | None:
    """The most likely tokens and the actual one. Among tokens with the same name, the most likely one counts."""
    if entry is None:
        return None
    named: dict[str, float] = {}
    for token, logprob in (*entry.top[:top], (entry.token_id, entry.logprob)):
        name = _token_name(token, tokenizer)
        named[name] = max(finite(logprob), named.get(name, LOWEST_LOGPROB))
    return named


def _token_name(token: int, tokenizer: Tokenizer) -> str:
    """The token's text, or its bytes if it is not valid UTF-8, so that names stay distinct."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
