import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.client.events import DONE, EventDecoder
from ostro.errors import BadAnswer

LINES = st.sampled_from(
    [b"data: {}", b"data:x", b"data", b"data: ", b": comment", b"id: 7", b"retry: 5", b"event: error", b"datas: y", b""]
)
STREAMS = st.lists(st.tuples(LINES | st.binary(max_size=6), st.sampled_from([b"\n", b"\r", b"\r\n"]))).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


def decoded(*pieces: bytes, decoder: EventDecoder | None = None) -> list[bytes]:
    decoder = decoder or EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 200), max_size=20), bom=st.booleans())
def test_any_split_of_the_bytes_gives_the_same_events(stream: bytes, cuts: list[int], bom: bool) -> None:
    stream = b"\xef\xbb\xbf" + stream if bom else stream
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    split = [stream[a:b] for a, b in itertools.pairwise(edges)]
    whole, parts, bytewise = EventDecoder(), EventDecoder(), EventDecoder()
    events = decoded(stream, decoder=whole)
    assert decoded(*split, decoder=parts) == events
    assert decoded(*(stream[i : i + 1] for i in range(len(stream))), decoder=bytewise) == events
    assert whole.pending == parts.pending == bytewise.pending


@given(payloads=st.lists(st.lists(st.binary().filter(lambda b: not set(b) & set(b"\r\n")), min_size=1)))
def test_payloads_come_out_as_they_went_in(payloads: list[list[bytes]]) -> None:
    stream = b"".join(b"".join(b"data: " + line + b"\n" for line in lines) + b"\n" for lines in payloads)
    decoder = EventDecoder()
    assert decoded(stream, decoder=decoder) == [b"\n".join(lines) for lines in payloads]
    assert not decoder.pending


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_each_way_to_end_a_line(end: bytes) -> None:
    stream = end.join([b"data: a", b"data: b", b"", b"data: [DONE]", b"", b""])
    assert decoded(stream) == [b"a\nb", DONE]


def test_an_event_is_handed_over_with_its_last_byte() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\r\n") == []
    assert decoder.feed(b"\r") == [b"a"]
    assert decoder.feed(b"\ndata: b\n\n") == [b"b"]


def test_comments_ids_and_events_without_data_are_passed_over() -> None:
    assert decoded(b": still here\n\nid: 1\n\nevent: error\ndata: a\nid: 2\nretry: 3\n\n") == [b"a"]


def test_a_byte_order_mark_counts_at_the_start_alone() -> None:
    assert decoded(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n") == [b"a"]


def test_an_event_that_was_cut_short_is_pending() -> None:
    decoder = EventDecoder()
    assert decoded(b"data: a\n\ndata: b\n", decoder=decoder) == [b"a"]
    assert decoder.pending


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("stream", [b"data: " + b"x" * 99, b"data: xxx\n" * 20, b":" + b"x" * 200 + b"\n"])
def test_an_event_without_an_end_is_refused(stream: bytes, piece: int) -> None:
    pieces = [stream[i : i + piece] for i in range(0, len(stream), piece)]
    with pytest.raises(BadAnswer, match="more than 99 bytes"):
        decoded(*pieces, decoder=EventDecoder(max_event_bytes=99))


def test_the_bound_is_for_each_event_by_itself() -> None:
    assert len(decoded(b"data: xxx\n\n" * 50, decoder=EventDecoder(max_event_bytes=20))) == 50
