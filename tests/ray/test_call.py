"""What a request is routed by, read from its body."""

import json
from collections.abc import Mapping, Sequence

import pytest

from ostro.ray.forwarded_request import key_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 3}', b'{"prompt": [[1, 2], [3]]}', b'{"model": 3}'])
def test_nonsensical_body_has_a_routing_key_too(body: bytes) -> None:
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
