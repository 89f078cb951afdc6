"""The two writers of chat streams: for plain text, and for answers that are read. On plain text they are twins."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ostro.engine.runner import TokenLogprob
from ostro.frontend.outputs import Choice, Completion, Delta
from ostro.schemas import ChatCompletionRequest, parse
from ostro.server.dialects.chat.writer import AnswerChunks, ChatChunks, Chunks
from ostro.server.dialects.chat_turn import AnswerStream
from ostro.text.id_text import IdTokenizer

REQUEST = parse(
    ChatCompletionRequest,
    {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "stream_options": {"include_usage": True}},
)
texts = st.lists(st.text(max_size=4), min_size=1, max_size=6)


def written(chunks: Chunks, deltas: list[Delta]) -> list[list[Any]]:
    data = chunks.start() + b"".join(chunks.of(0, [delta]) for delta in deltas) + chunks.end()
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
    plain = ChatChunks(REQUEST, done, tokenizer, model="m")
    read = AnswerChunks(REQUEST, done, AnswerStream(done), tokenizer, model="m")
    found = written(read, deltas)
    expected = written(plain, deltas)
    if with_logprobs:
        # A delta without text has its log-probabilities all the same: beside an empty text, or beside nothing.
        for event in [*found, *expected]:
            for choice in event[0]:
                choice["delta"].setdefault("content", "")
    assert found == expected
