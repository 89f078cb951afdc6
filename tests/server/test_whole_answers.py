import math

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from ostro.engine.runner import TokenLogprob
from ostro.errors import StructureFailed
from ostro.frontend.outputs import Choice, Completion
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.completions import CompletionLogprobs, CompletionRequest, CompletionResponse
from ostro.schemas.wire import parse
from ostro.server.dialects.chat.writer import chat_writer
from ostro.server.dialects.chat_turn import CompletionReader
from ostro.server.dialects.completions.writer import CompletionWriter
from ostro.server.dialects.openai import finish_reason, usage
from ostro.text.tokenizer import Tokenizer

# é is two bytes. Id 2 has both, and so has id 4, added later: they share their text. Id 5 is special.
FIRST_HALF, SECOND_HALF, WHOLE, A, TWIN, END = range(6)


def tokenizer() -> Tokenizer:
    core = Core(models.BPE({"Ã": 0, "©": 1, "Ã©": 2, "a": 3}, [("Ã", "©")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken("é", normalized=False)])
    core.add_special_tokens(["<end>"])
    return Tokenizer(core, eos_ids=[END])


def completion(ids: list[int], text: str, logprobs: list[TokenLogprob]) -> Completion:
    return Completion((A,), [Choice(0, text, ids, "stop", logprobs=logprobs)], prompt_logprobs=[None])


def answer(done: Completion, **fields: object) -> CompletionResponse:
    request = parse(CompletionRequest, {"prompt": "a", "logprobs": 1} | fields)
    return CompletionWriter(request, [done], tokenizer(), model="m").whole()


def logprobs_of(done: Completion, **fields: object) -> CompletionLogprobs:
    logprobs = answer(done, **fields).choices[0].logprobs
    assert logprobs is not None
    return logprobs


def test_likelier_of_two_tokens_with_one_text_keeps_its_log_probability() -> None:
    entry = TokenLogprob(TWIN, -2.0, rank=2, top=((WHOLE, -0.5),))
    logprobs = logprobs_of(completion([TWIN], "é", [entry]))
    assert (logprobs.token_logprobs, logprobs.top_logprobs) == ([-2.0], [{"é": -0.5}])


def test_greedy_token_equals_the_maximum_exactly() -> None:
    entry = TokenLogprob(WHOLE, -0.1, rank=1, top=((WHOLE, -0.1), (TWIN, -0.7)))
    logprobs = logprobs_of(completion([WHOLE], "é", [entry]), logprobs=2)
    assert logprobs.top_logprobs == [{"é": -0.1}]
    assert logprobs.token_logprobs == [-0.1]


def test_offsets_point_at_characters_however_tokens_cut_them() -> None:
    ids = [A, FIRST_HALF, SECOND_HALF, A, END]
    entries = [TokenLogprob(token, -1.0, rank=1) for token in ids]
    logprobs = logprobs_of(completion(ids, "aéa", entries), echo=True)
    assert logprobs.tokens == ["a", "a", "bytes:\\xc3", "bytes:\\xa9", "a", "<end>"]
    assert logprobs.text_offset == [0, 1, 2, 2, 3, 4]


def test_tokens_that_a_stop_string_cut_off_lie_at_the_end() -> None:
    entries = [TokenLogprob(A, -1.0, rank=1)] * 3
    assert logprobs_of(completion([A, A, A], "a", entries)).text_offset == [0, 1, 1]


def test_impossible_token_has_a_number_that_json_can_write() -> None:
    entry = TokenLogprob(A, -math.inf, rank=4, top=((WHOLE, 0.0),))
    done = completion([A], "a", [entry])
    assert logprobs_of(done).token_logprobs == [-9999.0]
    assert '"token_logprobs":[-9999.0]' in answer(done).model_dump_json()


def test_chat_tokens_carry_their_exact_bytes() -> None:
    entry = TokenLogprob(FIRST_HALF, -1.0, rank=1, top=((FIRST_HALF, -1.0), (WHOLE, -2.0)))
    messages = [{"role": "user", "content": "a"}]
    request = parse(ChatCompletionRequest, {"messages": messages, "logprobs": True, "top_logprobs": 2})
    finished = completion([FIRST_HALF], "�", [entry])
    response = chat_writer(request, CompletionReader(finished), tokenizer(), model="m").whole()
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content[0].bytes == [0xC3]
    assert [(top.token, top.bytes) for top in logprobs.content[0].top_logprobs] == [
        ("�", [0xC3]),
        ("é", [0xC3, 0xA9]),
    ]


def test_usage_counts_what_was_tried_of_a_prediction() -> None:
    done = completion([A, A], "aa", [])
    done.has_prediction, done.num_accepted, done.num_rejected = True, 5, 2
    details = usage([done]).completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (5, 2)
    assert usage([done]).completion_tokens == 2
    with_reasoning = usage([done], num_reasoning=1).completion_tokens_details
    assert with_reasoning is not None
    assert with_reasoning.reasoning_tokens == 1


def test_a_structure_that_failed_is_the_requests_fault_whole_and_in_a_stream() -> None:
    error = f"{StructureFailed.opening} any further: too many items. Simplify the schema or grammar."
    choice = Choice(0, finish_reason="error", error=error)
    with pytest.raises(StructureFailed, match="too many items"):
        finish_reason(choice)
    with pytest.raises(StructureFailed, match="too many items"):
        CompletionReader(Completion((1,), [choice])).finish_reason(0)
