"""Where a request goes, by its prefix, its model and the replicas' loads."""

import json
import random
from collections.abc import Mapping, Sequence

import pytest

from ostro.ray.call import BLOCK, blocks_of, key_of
from ostro.ray.placement import Candidate, PrefixIndex, ranked

DICE = random.Random(7)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def text(name: str, blocks: int) -> str:
    return (name * BLOCK)[:BLOCK] * blocks


def best(*candidates: Candidate, num_history: int = 10) -> str:
    return ranked(candidates, num_history, DICE)[0]


def test_texts_have_as_many_blocks_in_common_as_they_begin_alike() -> None:
    first, second = blocks_of(text("a", 3) + "tail"), blocks_of(text("a", 2) + text("b", 3))
    assert (len(first), len(second)) == (3, 5)
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second)
    assert not set(first) & set(blocks_of(text("a", 3), salt="another model"))


def test_index_tells_how_much_each_replica_was_sent() -> None:
    index = PrefixIndex()
    index.add(blocks_of(text("a", 4)), "one")
    index.add(blocks_of(text("a", 2) + text("b", 2)), "two")
    assert index.matches(blocks_of(text("a", 3) + text("c", 2))) == {"one": 3, "two": 2}
    assert index.matches(blocks_of(text("c", 2))) == {}


def test_index_forgets_the_oldest_and_ends_before_beginnings() -> None:
    index = PrefixIndex(most_blocks=6)
    index.add(blocks_of(text("a", 4)), "one")
    index.add(blocks_of(text("b", 4)), "one")
    assert len(index) == 6
    assert index.matches(blocks_of(text("a", 4))) == {"one": 2}
    assert index.matches(blocks_of(text("b", 4))) == {"one": 4}


def test_index_forgets_replicas_that_are_gone() -> None:
    index = PrefixIndex()
    index.add(blocks_of(text("a", 2)), "one")
    index.add(blocks_of(text("a", 1)), "two")
    index.forget(["one"])
    assert index.matches(blocks_of(text("a", 2))) == {"two": 1}
    assert len(index) == 1


def test_request_goes_to_its_prefix_unless_there_is_much_more_to_do() -> None:
    idle = Candidate("idle", load=0)
    assert best(Candidate("holder", load=8, matched=9), idle) == "holder"
    assert best(Candidate("holder", load=9, matched=9), idle) == "idle"
    busy = Candidate("busy", load=100)
    assert best(Candidate("holder", load=150, matched=9), busy) == "holder"
    assert best(Candidate("holder", load=160, matched=9), busy) == "busy"


def test_a_few_common_words_are_no_reason_to_queue() -> None:
    assert best(Candidate("holder", load=2, matched=4), Candidate("idle", load=0)) == "idle"
    assert best(Candidate("holder", load=2, matched=5), Candidate("idle", load=0)) == "holder"


def test_of_two_that_are_as_good_the_one_with_less_to_do_is_taken() -> None:
    assert best(Candidate("busy", load=3, matched=10), Candidate("idle", load=2, matched=10)) == "idle"
    assert {best(Candidate("one", load=1), Candidate("two", load=1)) for _ in range(50)} == {"one", "two"}


def test_request_goes_where_its_model_is_loaded() -> None:
    loaded, other = Candidate("loaded", load=5), Candidate("other", load=0, has_model=False)
    assert best(loaded, other) == "loaded"
    assert best(Candidate("loaded", load=50), other) == "other"
    few = Candidate("few", load=0, has_model=False, num_models=1)
    assert best(Candidate("many", load=0, has_model=False, num_models=2), few) == "few"


def test_replica_whose_engine_is_started_anew_comes_last() -> None:
    restarting = Candidate("restarting", load=0, matched=10, is_ready=False)
    assert ranked([restarting, Candidate("ready", load=50)], 10, DICE) == ["ready", "restarting"]
    assert best(restarting) == "restarting"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 3}', b'{"prompt": [[1, 2], [3]]}', b'{"model": 3}'])
def test_body_that_makes_no_sense_has_a_key_too(body: bytes) -> None:
    assert key_of(COMPLETIONS, body).model == "default"


def test_key_of_a_conversation_leads_to_its_earlier_turns() -> None:
    system, first = "rules " * 100, "question " * 40
    turns = [{"role": "system", "content": system}, {"role": "user", "content": first}]
    earlier = key_of(CHAT, _chat(turns))
    answer, then = {"role": "assistant", "content": "words " * 500}, {"role": "user", "content": "and?"}
    later = key_of(CHAT, _chat([*turns, answer, then]))
    assert later.blocks[: len(earlier.blocks)] == earlier.blocks
    assert later.num_history == len(earlier.blocks) == earlier.num_history
    assert len(later.blocks) > 2 * later.num_history


def test_model_may_be_named_in_the_path() -> None:
    body = b'{"prompt": "x", "model": "other"}'
    assert key_of(COMPLETIONS, body).model == "other"
    assert key_of("/v1/org/name/completions", body).model == "org/name"
    assert key_of("/v1/org/name/chat/completions", body).model == "org/name"
    assert key_of(CHAT, body).model == "other"


def test_parts_and_tokens_are_prompts_too() -> None:
    parts = [{"type": "text", "text": "x" * 300}]
    assert key_of(CHAT, _chat([{"role": "user", "content": parts}])) == key_of(
        CHAT, _chat([{"role": "user", "content": "x" * 300}])
    )
    assert key_of(COMPLETIONS, b'{"prompt": [%s]}' % b",".join([b"17"] * 500)).num_history > 5
    long = key_of(COMPLETIONS, b'{"prompt": [%s]}' % b",".join([b"1"] * 100_000))
    assert len(long.blocks) == long.num_history == 512
    assert (
        key_of(COMPLETIONS, b'{"prompt": ["%s", "y"]}' % (b"z" * 300)).blocks
        == key_of(COMPLETIONS, b'{"prompt": "%s"}' % (b"z" * 300)).blocks
    )


def _chat(messages: Sequence[Mapping[str, object]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()
