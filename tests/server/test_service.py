"""The service: text in, text out, for many callers at once."""

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from live_service import endless, live_service, set_faults, until, until_idle
from model_directory import make_embedding_model, write_model

from ostro import LLM
from ostro.config import EngineConfig
from ostro.engine.request import Request
from ostro.engine.runner import TokenLogprob
from ostro.errors import BadRequest, ContextLengthExceeded, ModelNotFound, Unavailable, Unsupported
from ostro.frontend.outputs import Completion
from ostro.frontend.requests import Message
from ostro.processes.children import children
from ostro.sampling_params import SamplingParams
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.models.service import ModelService, State

CHAT = [{"role": "user", "content": "Hello"}]
LONG = "a long way to go, and back again. " * 100


def assert_equal(found: Completion, wanted: Completion) -> None:
    """The same tokens and texts; log-probabilities up to the rounding of differently shaped batches."""
    for one, other in zip(found.choices, wanted.choices, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert (one.finish_reason, one.stopped_by) == (other.finish_reason, other.stopped_by)
        assert values(one.logprobs) == pytest.approx(values(other.logprobs), abs=1e-4)
    assert values(found.prompt_logprobs) == pytest.approx(values(wanted.prompt_logprobs), abs=1e-4)


def values(logprobs: Sequence[TokenLogprob | None] | None) -> list[float]:
    return [each.logprob for each in logprobs or () if each is not None]


@pytest.mark.full
def test_service_gives_what_the_offline_engine_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTRO_FAULTS", raising=False)
    model = make_embedding_model(write_model(tmp_path / "tiny"))
    params = [
        SamplingParams(max_tokens=12, temperature=0, logprobs=2),
        SamplingParams(max_tokens=12, seed=5, n=2, stop=("o", "the")),
        SamplingParams(max_tokens=3, seed=6, prompt_logprobs=1, bad_words=("dog",)),
    ]
    llm = LLM(model, EngineConfig(threads=1))
    expected = [llm.generate([prompt], p)[0] for p in params for prompt in ("the quick", "yes")]
    expected_chat, expected_vector = llm.chat(CHAT, params[0]), llm.embed("the dog")[0]

    async def scenario() -> None:
        async with live_service(EngineConfig(model=str(model), threads=1)) as service:
            assert service.name == "tiny"
            runs = [service.generate(prompt, p) for p in params for prompt in ("the quick", "yes")]
            for found, wanted in zip(await asyncio.gather(*runs), expected, strict=True):
                assert_equal(found, wanted)
            chat = await service.prepare_chat(ChatRequest(messages=CHAT, params=params[0]))
            assert_equal(await service.complete(chat.request), expected_chat)
            vector = await service.complete(*await service.prepare_embeddings(["the dog"]))
            assert vector.embedding == pytest.approx(expected_vector, abs=1e-6)
            await until_idle(service)

    asyncio.run(scenario())


def is_checker(pid: int) -> bool:
    try:
        return b"ostro.grammar.check_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        # It has ended.
        return False


@pytest.mark.full
def test_an_idle_model_loads_what_structured_outputs_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them took 8 s on a fresh server."""
    set_faults(monkeypatch)
    service = ModelService(EngineConfig(model=str(write_model(tmp_path / "tiny"))))

    def checkers() -> set[int]:
        return {pid for pid in children() if is_checker(pid)}

    async def scenario() -> None:
        before = checkers()
        await service.start()
        try:
            await service.settled()
            await until(lambda: "llguidance" in Path(f"/proc/{service.engine_pid}/maps").read_text())
            await until(lambda: bool(checkers() - before))
        finally:
            await service.stop()
        await until(lambda: checkers() <= before)

    asyncio.run(scenario())


def test_deltas_of_a_stream_add_up_to_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.002")
    params = SamplingParams(max_tokens=40, n=3, seed=1, logprobs=0, ignore_eos=True)

    async def scenario() -> None:
        async with live_service() as service:
            whole = await service.generate("Once", params)
            texts, tokens, logprobs = [""] * 3, [0] * 3, [0] * 3
            async for delta in service.stream_generate("Once", params):
                texts[delta.index] += delta.text
                tokens[delta.index] += len(delta.token_ids)
                logprobs[delta.index] += len(delta.logprobs or ())
            assert texts == [choice.text for choice in whole.choices]
            assert tokens == logprobs == [40] * 3

    asyncio.run(scenario())


@pytest.mark.full
def test_stop_string_ends_its_choice_in_the_engine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.002")

    async def scenario() -> None:
        async with live_service() as service:
            params = SamplingParams(max_tokens=None, ignore_eos=True, seed=1, n=2, stop=("e",))
            completion = await asyncio.wait_for(service.generate("Once", params), 10)
            for choice in completion.choices:
                assert (choice.finish_reason, choice.stopped_by) == ("stop", "e")
                assert "e" not in choice.text
            await until_idle(service)

    asyncio.run(scenario())


def test_stop_string_that_is_not_unicode_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def scenario() -> None:
        async with live_service() as service:
            completion = await service.generate("Once", SamplingParams(max_tokens=3, stop=("\ud800",), ignore_eos=True))
            assert completion.num_generated == 3
            assert service.restarts == 0

    asyncio.run(scenario())


@pytest.mark.full
@pytest.mark.parametrize("text", ["word ", LONG], ids=["inline", "in a thread"])
def test_request_that_cannot_run_is_refused_by_the_callers_name_for_it(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    set_faults(monkeypatch)
    params = SamplingParams(max_tokens=8192)

    async def scenario() -> None:
        async with live_service() as service:
            with pytest.raises(ContextLengthExceeded) as refusal:
                await service.prepare(text, params)
            assert refusal.value.param == "prompt"
            with pytest.raises(ContextLengthExceeded) as refusal:
                await service.prepare_chat(ChatRequest(messages=[{"role": "user", "content": text}], params=params))
            assert refusal.value.param == "messages"
            with pytest.raises(BadRequest, match="prompt holds token id 99999999"):
                await service.prepare([99999999], SamplingParams())
            with pytest.raises(Unsupported):
                await service.prepare_embeddings([text])
            assert service.num_requests == 0

    asyncio.run(scenario())


@pytest.mark.full
def test_request_carries_the_callers_standing(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    def standing(request: Request) -> tuple[str, int, int]:
        return request.cache_salt, request.priority, request.turn

    async def scenario() -> None:
        async with live_service() as service:
            one = await service.prepare("a", SamplingParams(), cache_salt="k", priority=2, turn=3)
            chat = ChatRequest(messages=CHAT, params=SamplingParams(), cache_salt="k", priority=2)
            two = (await service.prepare_chat(chat, turn=3)).request
            assert standing(one) == standing(two) == ("k", 2, 3)
            assert one.id != two.id

    asyncio.run(scenario())


@pytest.mark.full
def test_requests_made_in_threads_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def scenario() -> None:
        async with live_service() as service:
            made = await asyncio.gather(*(service.prepare(LONG, SamplingParams()) for _ in range(50)))
            assert len({request.id for request in made}) == 50

    asyncio.run(scenario())


def test_event_loop_turns_while_a_long_prompt_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def scenario() -> None:
        async with live_service() as service:
            loop = asyncio.get_running_loop()
            preparing = asyncio.create_task(service.prepare(LONG * 300, SamplingParams()))
            gaps = []
            while not preparing.done():
                began = loop.time()
                await asyncio.sleep(0.001)
                gaps.append(loop.time() - began)
            with pytest.raises(ContextLengthExceeded):
                await preparing
            # On the loop it would block for seconds.
            assert max(gaps) < 1.0

    asyncio.run(scenario())


@pytest.mark.full
def test_service_that_loads_says_so_and_then_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "load_seconds=1")

    async def scenario() -> None:
        service = ModelService(EngineConfig())
        await service.start()
        try:
            with pytest.raises(Unavailable, match="loading"):
                await service.prepare("a", SamplingParams())
            with pytest.raises(Unavailable, match="loading"):
                _ = service.tokenizer
            assert (service.state, service.info, service.failure, service.pooling) == (State.LOADING, None, None, None)
            await service.settled()
            assert (service.state, service.failure) == (State.READY, None)
            assert service.tokenizer.encode("a")
            assert service.info is not None
            assert service.info.name == service.name
        finally:
            await service.stop()
        assert (service.state, service.failure) == (State.STOPPED, None)
        with pytest.raises(Unavailable, match="stopped"):
            await service.prepare("a", SamplingParams())

    asyncio.run(scenario())


def test_tokenizer_that_cannot_be_loaded_fails_the_service_and_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_faults(monkeypatch)

    async def scenario() -> None:
        service = ModelService(EngineConfig(tokenizer=str(tmp_path / "nowhere")))
        await service.start()
        with pytest.raises(ModelNotFound, match="nowhere"):
            await asyncio.wait_for(service.settled(), 10)
        assert service.state is State.FAILED
        await until(lambda: service.engine_pid is None or not Path(f"/proc/{service.engine_pid}").exists())
        with pytest.raises(ModelNotFound):
            await service.prepare("a", SamplingParams())
        await service.stop()

    asyncio.run(scenario())


def test_model_that_does_not_exist_fails_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def scenario() -> None:
        service = ModelService(EngineConfig(model="./no/such/model"))
        assert service.name == "model"
        await service.start()
        with pytest.raises(ModelNotFound, match="There is no file or directory"):
            await asyncio.wait_for(service.settled(), 10)
        assert isinstance(service.failure, ModelNotFound)
        await service.stop()

    asyncio.run(scenario())


@pytest.mark.full
def test_requests_under_way_end_when_the_service_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.01")

    async def scenario() -> None:
        async with live_service() as service:
            task = asyncio.create_task(service.complete(await endless(service)))
            await until(lambda: service.num_requests == 1)
            await service.stop()
            with pytest.raises(Unavailable, match="stopped"):
                await task

    asyncio.run(scenario())


@pytest.mark.full
def test_conversations_being_rendered_end_when_the_service_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def scenario() -> None:
        async with live_service() as service:
            process = service.tokenizer.renderer.pid
            assert process is not None
            os.kill(process, signal.SIGSTOP)
            rendering = asyncio.create_task(service.prepare_chat(ChatRequest(messages=CHAT, params=SamplingParams())))
            await asyncio.sleep(0.01)
            await service.stop()
            with pytest.raises(Unavailable, match="stopped"):
                await asyncio.wait_for(rendering, 30)

    asyncio.run(scenario())


def test_texts_that_wait_for_a_thread_end_when_the_service_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ended as if their clients had left, and later ones with a RuntimeError of the thread pool's."""
    set_faults(monkeypatch)
    stopped = threading.Event()

    async def scenario() -> None:
        async with live_service() as service:
            busy = [asyncio.create_task(service.run_off_loop(stopped.wait)) for _ in range(2)]
            waiting = asyncio.create_task(service.prepare(LONG, SamplingParams()))
            await asyncio.sleep(0.01)
            await service.stop()
            stopped.set()
            assert await asyncio.gather(*busy) == [True, True]
            with pytest.raises(Unavailable, match="stopped"):
                await waiting
            with pytest.raises(Unavailable, match="stopped"):
                await service.run_off_loop(stopped.wait)

    asyncio.run(scenario())


async def refusal(service: ModelService, kind: str, text: str) -> ContextLengthExceeded:
    params = SamplingParams(max_tokens=1)
    preparing = (
        service.prepare(text, params)
        if kind == "prompt"
        else service.prepare_chat(ChatRequest(messages=[{"role": "user", "content": text}], params=params))
    )
    with pytest.raises(ContextLengthExceeded) as found:
        await preparing
    return found.value


@pytest.mark.full
@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen megabytes took a thread for seconds, only to be told that they were too long."""
    set_faults(monkeypatch)

    async def scenario() -> None:
        async with live_service(EngineConfig(max_seq_len=64)) as service:
            text = "a b c d. " * 1000
            fewest = service.tokenizer.fewest_tokens(text)
            assert fewest > 64
            error = await refusal(service, kind, text + "end")
            assert (error.prompt, error.param) == (service.tokenizer.fewest_tokens(text + "end"), kind)
            assert str(error).startswith("This model's maximum context length is 64 tokens")
            # One that might fit is counted.
            assert (await refusal(service, kind, text[:2000])).prompt > 1000

    asyncio.run(scenario())


MEGABYTE = "x" * (1 << 20)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": MEGABYTE}}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "fields",
    [{"name": MEGABYTE}, {"tool_call_id": MEGABYTE}, {"reasoning_content": MEGABYTE}, {"tool_calls": [CALL]}],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_the_template_ignores_are_as_limited_as_the_text(
    fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were sent to the render process whatever their length: only the text that it made was measured."""
    set_faults(monkeypatch)
    template = tmp_path / "hi.jinja"
    template.write_text("hi")

    async def scenario() -> None:
        async with live_service(EngineConfig(max_seq_len=64, chat_template=str(template))) as service:
            messages: list[Message] = [*CHAT, {"role": "assistant", "content": "", **fields}, *CHAT]
            with pytest.raises(BadRequest, match=f"messages has more than {1 << 20} characters") as refusal:
                await service.prepare_chat(ChatRequest(messages=messages, params=SamplingParams(max_tokens=1)))
            assert refusal.value.param == "messages"
            with pytest.raises(BadRequest, match="messages has more than"):
                await service.render_chat(ChatRequest(messages=messages, params=SamplingParams()))
            assert await service.prepare_chat(ChatRequest(messages=CHAT, params=SamplingParams(max_tokens=1)))

    asyncio.run(scenario())


@pytest.mark.full
def test_text_that_a_template_makes_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)
    template = tmp_path / "long.jinja"
    template.write_text(f"{{{{ 'a' * {1 << 21} }}}}")

    async def scenario() -> None:
        async with live_service(EngineConfig(max_seq_len=64, chat_template=str(template))) as service:
            with pytest.raises(BadRequest, match=f"text of {1 << 21} characters, but at most {1 << 20}") as refusal:
                await service.prepare_chat(ChatRequest(messages=CHAT, params=SamplingParams(max_tokens=1)))
            assert refusal.value.param == "messages"

    asyncio.run(scenario())


@pytest.mark.full
def test_white_space_that_a_template_may_drop_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def scenario() -> None:
        async with live_service(EngineConfig(max_seq_len=64)) as service:
            text = "a" + " \t" * 10_000
            # This template keeps it: so it was counted.
            assert (await refusal(service, "messages", text)).prompt > 2 * service.tokenizer.fewest_tokens(text)

    asyncio.run(scenario())
