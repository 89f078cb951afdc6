"""Messages between the processes: what goes in comes out, and nothing else does."""

import msgspec
import pytest

from ostro.config import EngineConfig
from ostro.engine.constraint import Constraint
from ostro.engine.counters import Counters
from ostro.engine.request import Request, Task
from ostro.engine.runner import TokenLogprob
from ostro.engine.scheduler import Progress
from ostro.engine.sequence import FinishReason
from ostro.engine_process.messages import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    Abort,
    Boot,
    FromEngine,
    Heartbeat,
    LoadFailed,
    Located,
    ModelInfo,
    Ready,
    Refused,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    body_length,
    decode_from_engine,
    decode_to_engine,
    frame,
)
from ostro.sampling_params import SamplingParams
from ostro.structured import StructuredOutput

STRUCTURED = StructuredOutput(choice=("yes", "nö"), jump_forward=True)
REQUEST = Request(
    id=7,
    prompt_ids=(1, 2, 3),
    params=SamplingParams(
        n=2, logit_bias={5: -100.0}, stop_token_ids=(9,), seed=-4, top_k=-1, logprobs=3, structured=STRUCTURED
    ),
    seed=-4,
    eos_ids=frozenset({2}),
    bad_word_ids=((4, 5), (6,)),
    prompt_logprobs_from=1,
    cache_salt="tenant",
    priority=-1,
    turn=3,
    task=Task.EMBED,
    constraint=Constraint(
        grammar="start: /é+/", free_until="</think>", free_tokens=9, lazy=True, jump_forward=True, is_users=True
    ),
)
PROGRESS = Progress(
    7,
    1,
    token_ids=[11, 12],
    logprobs=[TokenLogprob(11, -0.5, 1, top=((11, -0.5), (3, -1.25)))],
    prompt_logprobs=[TokenLogprob(2, -9.0, 40)],
    finish_reason=FinishReason.LENGTH,
    error="why",
    num_cached=16,
    pooled=[0.25, -1.0],
)
INFO = ModelInfo("m", 8192, 49152, True, 16, 4096, 1.5, 0.25, 1 << 33)


@pytest.mark.parametrize(
    "message", [Boot(EngineConfig(model="m", threads=2)), Submit(REQUEST), Abort(7), Abort(7, 1), Stop()], ids=repr
)
def test_message_to_the_engine_arrives_as_it_was_sent(message: ToEngine) -> None:
    data = frame(message)
    assert body_length(data[: LENGTH.size]) == len(data) - LENGTH.size
    assert decode_to_engine(data[LENGTH.size :]) == message


@pytest.mark.parametrize(
    "message",
    [
        Located("m", "/models/m"),
        Ready(INFO),
        LoadFailed("BadCheckpoint", "It is damaged."),
        Heartbeat(Counters(steps=3), running=1, pages_total=8, pages_free=7),
        Stepped([PROGRESS, Progress(8, 0)]),
        Stepped([], begun=[7, 8], begun_at=12.5, preempted=[3]),
        Stepped([], begun=[], begun_at=None, preempted=[]),
        Refused(7, "It is too long.", "prompt"),
    ],
    ids=repr,
)
def test_message_from_the_engine_arrives_as_it_was_sent(message: FromEngine) -> None:
    assert decode_from_engine(frame(message)[LENGTH.size :]) == message


def test_each_side_reads_only_the_messages_that_are_meant_for_it() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_to_engine(frame(Heartbeat())[LENGTH.size :])
    with pytest.raises(msgspec.ValidationError):
        decode_from_engine(frame(Stop())[LENGTH.size :])


def test_field_of_the_wrong_type_is_refused() -> None:
    body = msgspec.msgpack.encode({"type": "Abort", "request_id": "seven"})
    with pytest.raises(msgspec.ValidationError, match="request_id"):
        decode_to_engine(body)


def test_damaged_length_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes was announced"):
        body_length(LENGTH.pack(MAX_MESSAGE_BYTES + 1))
