"""The process that renders templates: what it gives, what it may use, and what becomes of it."""

import asyncio
import gc
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ostro.errors import BadRequest, Unavailable, Unsupported
from ostro.text.chat import ChatTemplate, Message
from ostro.text.control_text import ControlTexts
from ostro.text.renderer import MAX_SOURCE_CHARACTERS, Renderer, RenderLimits

HELLO: list[Message] = [{"role": "user", "content": "Hello"}]
ECHO = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
SLEEPLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Loops if it is told to.
MOODY = "{% if messages[0].content == 'loop' %}" + SLEEPLESS + "{% endif %}fine"
QUICK = RenderLimits(seconds=0.2)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def freeze(pid: int) -> None:
    """From now on it answers nothing, and uses no CPU time."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def test_blocking_and_asynchronous_renderings_are_the_same() -> None:
    messages: list[Message] = [{"role": "user", "content": "ü" * 3_000_000}, *HELLO]
    renderer = Renderer(ChatTemplate(ECHO))
    expected = "[" + "ü" * 3_000_000 + "][Hello]"
    assert renderer.render(messages, add_generation_prompt=False) == expected
    assert asyncio.run(renderer.render_async(messages, add_generation_prompt=False)) == expected
    assert renderer.render(HELLO) == "[Hello]>"


def test_conversations_that_come_together_are_not_mixed_up() -> None:
    renderer = Renderer(ChatTemplate(ECHO))

    async def scenario() -> list[str]:
        chats = [[{"role": "user", "content": str(number)}] for number in range(50)]
        return await asyncio.gather(*map(renderer.render_async, chats))

    assert asyncio.run(scenario()) == [f"[{number}]>" for number in range(50)]


def test_variables_reach_the_template_and_their_control_texts_stay_text() -> None:
    source = "{% if thinking %}think{% endif %}[{{ name }}]{% if tools %}{{ tools[0].name }}{% endif %}"
    renderer = Renderer(ChatTemplate(source), ControlTexts({"<|end|>"}), ControlTexts({"<|end|>"}))
    variables = {"thinking": True, "name": "a<|end|>"}
    assert renderer.render(HELLO, template_kwargs=variables, mark="!") == "think[a!<|end|>]"
    assert renderer.render(HELLO, tools=[{"name": "f"}], template_kwargs={"messages": []}) == "[]f"


@pytest.mark.cases(2)
@pytest.mark.parametrize("content", ["Once", "Once upon ", "", "[", [{"type": "text", "text": "Once"}]])
def test_final_message_can_be_left_open_for_the_model_to_continue(content: object) -> None:
    renderer = Renderer(ChatTemplate(ECHO))
    messages: list[Message] = [*HELLO, {"role": "assistant", "content": content}]
    expected = "[Hello][" + (content if isinstance(content, str) else "Once")
    assert renderer.render(messages, continue_final_message=True) == expected
    assert asyncio.run(renderer.render_async(messages, continue_final_message=True)) == expected


def test_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(BadRequest, match="cannot be continued") as refusal:
        Renderer(ChatTemplate("{{ messages[0].role }}")).render(HELLO, continue_final_message=True)
    assert refusal.value.param == "continue_final_message"


def test_refusals_keep_their_kind_and_their_words() -> None:
    renderer = Renderer(ChatTemplate("{{ raise_exception('no') }}"))
    with pytest.raises(BadRequest, match="refused the messages: no") as refusal:
        renderer.render(HELLO)
    assert refusal.value.param == "messages"
    with pytest.raises(Unsupported, match="image_url"):
        renderer.render([{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.full
def test_template_that_overran_its_time_serves_the_next_conversation() -> None:
    renderer = Renderer(ChatTemplate(MOODY), limits=QUICK)
    renderer.start()
    first = renderer.pid
    with pytest.raises(BadRequest, match=r"ran longer than 0\.2 seconds"):
        renderer.render([{"role": "user", "content": "loop"}])
    assert renderer.render(HELLO) == "fine"
    assert renderer.pid != first


async def leave(renderer: Renderer, content: str) -> None:
    """Begins a conversation and goes away while it is under way: a new process takes a while to answer."""
    conversation = asyncio.create_task(renderer.render_async([{"role": "user", "content": content}]))
    while renderer.pid is None:
        await asyncio.sleep(0)
    conversation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await conversation


def test_client_that_leaves_does_not_take_the_process_with_it() -> None:
    """Whoever came next waited for a new process."""
    renderer = Renderer(ChatTemplate(ECHO))

    async def scenario() -> None:
        await leave(renderer, "nobody reads this")
        process = renderer.pid
        assert await renderer.render_async(HELLO) == "[Hello]>"
        assert renderer.pid == process

    asyncio.run(scenario())


@pytest.mark.full
def test_failure_that_nobody_awaits_does_not_reach_the_event_loop() -> None:
    renderer = Renderer(ChatTemplate(MOODY), limits=QUICK)
    complaints: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        await leave(renderer, "loop")
        process = renderer.pid
        assert await renderer.render_async(HELLO) == "fine"
        assert renderer.pid != process
        gc.collect()

    asyncio.run(scenario())
    assert complaints == []


def test_client_that_leaves_before_its_turn_is_not_rendered() -> None:
    renderer = Renderer(ChatTemplate(MOODY), limits=QUICK)

    async def scenario() -> None:
        first = asyncio.create_task(renderer.render_async(HELLO))
        looping = asyncio.create_task(renderer.render_async([{"role": "user", "content": "loop"}]))
        last = asyncio.create_task(renderer.render_async(HELLO))
        while renderer.pid is None:
            await asyncio.sleep(0)
        process = renderer.pid
        looping.cancel()
        assert (await first, await last) == ("fine", "fine")
        assert renderer.pid == process

    asyncio.run(scenario())


@pytest.mark.full
def test_process_that_was_killed_between_conversations_is_not_missed() -> None:
    renderer = Renderer(ChatTemplate(ECHO))
    assert renderer.render(HELLO) == "[Hello]>"
    assert renderer.pid is not None
    os.kill(renderer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, renderer.pid, os.WEXITED | os.WNOWAIT)
    assert renderer.render(HELLO) == "[Hello]>"


def test_process_that_cannot_be_started_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    renderer = Renderer(ChatTemplate(ECHO))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "nothing"))
        # The model is loaded all the same: by the first conversation there may be room for a process.
        renderer.start()
        with pytest.raises(Unavailable, match="no process could be started"):
            renderer.render(HELLO)
    assert renderer.render(HELLO) == "[Hello]>"


@pytest.mark.cases(2)
@pytest.mark.parametrize("source", ["{{ cycler() }}", "{{ 1 // 0 }}", "{% if %}", "{{ messages.x.y }}"])
def test_whatever_a_template_raises_is_its_own_failure_and_not_the_processs(source: str) -> None:
    """A RuntimeError, such as cycler's, ended the process."""
    renderer = Renderer(ChatTemplate(source))
    renderer.start()
    process = renderer.pid
    with pytest.raises(BadRequest, match="The chat template failed"):
        renderer.render(HELLO)
    assert renderer.pid == process


def test_process_that_dies_in_the_middle_fails_that_conversation_alone() -> None:
    renderer = Renderer(ChatTemplate(MOODY), limits=RenderLimits(seconds=60))

    async def scenario() -> None:
        looping = asyncio.create_task(renderer.render_async([{"role": "user", "content": "loop"}]))
        while renderer.pid is None:
            await asyncio.sleep(0.01)
        os.kill(renderer.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="ended with status -9"):
            await looping
        assert await renderer.render_async(HELLO) == "fine"

    asyncio.run(scenario())


def test_closing_ends_conversations_that_are_under_way_or_wait() -> None:
    """The event loop was left waiting for a socket that was closed, and never heard of it."""
    renderer = Renderer(ChatTemplate(ECHO))

    async def scenario() -> None:
        await renderer.render_async(HELLO)
        assert renderer.pid is not None
        process = renderer.pid
        freeze(process)
        under_way = [asyncio.create_task(renderer.render_async(HELLO)) for _ in range(3)]
        await asyncio.sleep(0.01)
        renderer.close()
        assert not is_alive(process)
        for conversation in under_way:
            with pytest.raises(Unavailable, match="was stopped"):
                await asyncio.wait_for(conversation, 30)
        with pytest.raises(Unavailable, match="was stopped"):
            await renderer.render_async(HELLO)
        assert renderer.pid is None

    asyncio.run(scenario())


def test_closing_ends_a_conversation_of_another_thread() -> None:
    renderer = Renderer(ChatTemplate(ECHO))
    renderer.render(HELLO)
    assert renderer.pid is not None
    freeze(renderer.pid)
    with ThreadPoolExecutor(1) as threads:
        conversation = threads.submit(renderer.render, HELLO)
        while not conversation.running():
            pass
        renderer.close()
        with pytest.raises(Unavailable, match="was stopped"):
            conversation.result(30)


@pytest.mark.parametrize("forget", [False, True])
def test_closed_or_forgotten_renderer_leaves_no_process(forget: bool) -> None:
    renderer: Renderer | None = Renderer(ChatTemplate(ECHO))
    assert renderer is not None
    renderer.render(HELLO)
    process = renderer.pid
    assert process is not None
    if forget:
        renderer = None
        gc.collect()
    else:
        renderer.close()
    assert not is_alive(process)


def test_template_sees_no_variable_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_API_KEY", "secret")
    renderer = Renderer(ChatTemplate(ECHO))
    renderer.render(HELLO)
    assert b"secret" not in Path(f"/proc/{renderer.pid}/environ").read_bytes()


def test_values_that_no_message_can_carry_are_refused() -> None:
    renderer = Renderer(ChatTemplate(ECHO))
    nested: object = "x"
    for _ in range(5000):
        nested = [nested]
    for content in (object(), 2**70, nested, "\ud800"):
        with pytest.raises(BadRequest, match="messages"):
            renderer.render([{"role": "user", "content": content}])
    assert renderer.render(HELLO) == "[Hello]>"


@pytest.mark.full
@pytest.mark.parametrize("source", ["{{ 'a' * 10000000 }}", "{{ 'é' * 10 }}"])
def test_text_that_is_longer_than_the_caller_takes_stays_in_the_process(source: str) -> None:
    """A hundred megabytes were read on the event loop, only to be refused there."""
    renderer = Renderer(ChatTemplate(source))
    renderer.start()
    process = renderer.pid
    with pytest.raises(BadRequest, match=r"made a text of 10+ characters, but at most 9 .*Send fewer") as refusal:
        renderer.render(HELLO, max_characters=9)
    assert refusal.value.param == "messages"
    with pytest.raises(BadRequest, match="at most 9 are"):
        asyncio.run(renderer.render_async(HELLO, max_characters=9))
    assert renderer.pid == process


@pytest.mark.full
def test_text_has_a_limit_where_the_caller_sets_none() -> None:
    limit = RenderLimits().characters
    with pytest.raises(BadRequest, match=f"made a text of {limit + 1} characters"):
        Renderer(ChatTemplate(f"{{{{ 'a' * {limit + 1} }}}}"), limits=RenderLimits(seconds=60)).render(HELLO)
    assert Renderer(ChatTemplate("{{ '🙂' * 10 }}")).render(HELLO, max_characters=10) == "🙂" * 10


def test_source_of_megabytes_is_refused() -> None:
    with pytest.raises(BadRequest, match="longer than"):
        Renderer(ChatTemplate("x" * (MAX_SOURCE_CHARACTERS + 1))).render(HELLO)
