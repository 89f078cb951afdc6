"""The two writers of chat streams: for plain text, and for answers that are read. On plain text they are twins."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ostro.engine.runner import TokenLogprob
from ostro.frontend.outputs import Choice, Completion, Delta
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.wire import parse
from ostro.server.dialects.chat.writer import ChatWriter, ParsedChatWriter
from ostro.server.dialects.chat_turn import CompletionReader
from ostro.text.model_tokenizer import IdTokenizer

REQUEST = parse(
    ChatCompletionRequest,
    {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "stream_options": {"include_usage": True}},
)
texts = st.lists(st.text(max_size=4), min_size=1, max_size=6)


def written(writer: ChatWriter, deltas: list[Delta]) -> list[list[Any]]:
    data = writer.start() + b"".join(writer.of(0, [delta]) for delta in deltas) + writer.end()
    events = [json.loads(line.removeprefix(b"data: ")) for line in data.split(b"\n\n") if line]
    return [[event["choices"], event["usage"]] for event in events]


@given(texts, st.booleans())
def test_plain_answer_is_written_the_same_by_both(pieces: list[str], with_logprobs: bool) -> None:
    # An empty first piece only moves the opening, which one writer sends at once and the other with the first text.
    pieces = ["first", *pieces]
    logprobs = [TokenLogprob(1, -1.0, 1)] if with_logprobs else None
    deltas = [Delta(0, piece, None, [1], logprobs) for piece in pieces[:-1]]
    deltas.append(Delta(0, pieces[-1], "stop", [1], logprobs))
    done = Completion((1, 2), [Choice(0, "".join(pieces), [1] * len(pieces), "stop")])
    tokenizer = IdTokenizer(16)
    plain = ChatWriter(REQUEST, CompletionReader(done), tokenizer, model="m")
    read = ParsedChatWriter(REQUEST, CompletionReader(done), tokenizer, model="m")
    found = written(read, deltas)
    expected = written(plain, deltas)
    if with_logprobs:
        # A delta without text has its log-probabilities all the same: beside an empty text, or beside nothing.
        for event in [*found, *expected]:
            for choice in event[0]:
                choice["delta"].setdefault("content", "")
    assert found == expected


@given(st.lists(st.text(max_size=4), max_size=6), st.booleans(), st.integers(min_value=1, max_value=3))
def test_whole_answer_is_what_the_chunks_add_up_to(pieces: list[str], with_logprobs: bool, n: int) -> None:
    entries = [TokenLogprob(1, -1.0, 1) for _ in pieces] if with_logprobs else None
    choices = [Choice(index, "".join(pieces), [1] * len(pieces), "length", logprobs=entries) for index in range(n)]
    done = Completion((1, 2), choices)
    tokenizer = IdTokenizer(16)
    plain = ChatWriter(REQUEST, CompletionReader(done), tokenizer, model="m")
    read = ParsedChatWriter(REQUEST, CompletionReader(done), tokenizer, model="m")
    found = plain.whole()
    assert found.choices == read.whole().choices
    assert [choice.message.content for choice in found.choices] == ["".join(pieces)] * n
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    told = [None if choice.logprobs is None else len(choice.logprobs.content) for choice in found.choices]
    assert told == [len(pieces) if with_logprobs else None] * n
    assert found.usage.completion_tokens == n * len(pieces)
