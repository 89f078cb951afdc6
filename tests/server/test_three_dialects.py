"""One request in three dialects: the same text, calls and counts, streamed and not."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from dialect_calls import CHAT, MESSAGES, RESPONSES, answered, events
from dialects import Said, Unspeakable, by_chat, by_messages, by_responses, in_messages, in_responses
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer
from test_http_tools import CASES, KEYS, OPENED, SCRIPTS, THOUGHTS, Case, F, asked, function
from tool_templates import OPEN, QWEN

Json = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with SCRIPTS.served(tmp_path_factory.mktemp("dialects")) as live:
        yield live


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with SCRIPTS.served(tmp_path_factory.mktemp("thinking"), template=QWEN) as live:
        yield live


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with SCRIPTS.served(tmp_path_factory.mktemp("opened"), template=OPEN) as live:
        yield live


def answers(client: httpx.Client, chat: Json) -> list[Said]:
    """By every dialect that has words for the request, whole and streamed."""
    found = by_chat(client, chat) + by_responses(client, in_responses(chat) | {"store": False})
    try:
        return found + by_messages(client, in_messages(chat))
    except Unspeakable:
        return found


def check(client: httpx.Client, case: Case, key: str) -> None:
    said = answers(client, asked(key, **case.given))
    assert set(said) == {said[0]}
    assert said[0].text == (case.content or "")
    assert said[0].reasoning == (case.reasoning or "")
    assert [name for name, _ in said[0].calls] == [name for name, _ in case.calls]
    assert said[0].is_cut == (case.finish == "length")


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", CASES)
def test_an_answer_with_tools_is_the_same_in_all_dialects(server: LiveServer, name: str) -> None:
    with server.client() as client:
        check(client, CASES[name], KEYS[name])


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", [*CASES, *THOUGHTS])
def test_an_answer_by_a_template_with_tools_and_reasoning_is_the_same_in_all_dialects(
    thinking: LiveServer, name: str
) -> None:
    with thinking.client() as client:
        check(client, {**CASES, **THOUGHTS}[name], KEYS[name])


@pytest.mark.parametrize("name", OPENED)
def test_reasoning_opened_by_the_template_is_the_same_in_all_dialects(opened: LiveServer, name: str) -> None:
    with opened.client() as client:
        check(client, OPENED[name], KEYS[name])


def test_a_thought_within_a_tool_loop_is_rendered_again_in_all_dialects(thinking: LiveServer) -> None:
    """Sent back as a reasoning item, as sealed content alone, and as a thinking block."""
    key = KEYS["thought, text and call"]
    tools = [F]
    with thinking.client() as client:
        chat = answered(client, CHAT, **asked(key, tools=tools))["choices"][0]["message"]
        [call] = chat["tool_calls"]
        result = f"It is {KEYS['1 plain text']}."
        first: list[Json] = in_messages(asked(key))["messages"]
        messages = [*first, chat, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        counts = {answered(client, CHAT, messages=messages, tools=tools)["usage"]["prompt_tokens"]}

        body = in_responses(asked(key, tools=tools)) | {"store": False, "include": ["reasoning.encrypted_content"]}
        output = answered(client, RESPONSES, **body)["output"]
        returned = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": result}
        sealed = [{k: v for k, v in item.items() if k != "content" or item["type"] != "reasoning"} for item in output]
        for items in (output, sealed):
            again = answered(client, RESPONSES, **body | {"input": [*body["input"], *items, returned]})
            counts.add(again["usage"]["input_tokens"])

        body = in_messages(asked(key, tools=tools))
        message = answered(client, MESSAGES, **body)
        block = {"type": "tool_result", "tool_use_id": message["content"][-1]["id"], "content": result}
        turns = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": [block]}]
        usage = answered(client, MESSAGES, **body | {"messages": [*body["messages"], *turns]})["usage"]
        counts.add(usage["input_tokens"] + usage["cache_read_input_tokens"])
    assert len(counts) == 1


@pytest.mark.cases(3)
@pytest.mark.parametrize("max_tokens", range(1, 18))
def test_an_answer_cut_at_any_point_is_the_same_in_all_dialects(server: LiveServer, max_tokens: int) -> None:
    with server.client() as client:
        body = asked(KEYS["3 text and call"], tools=[F], max_tokens=max_tokens)
        chat, responses = by_chat(client, body), by_responses(client, in_responses(body))
        messages = by_messages(client, in_messages(body))
    assert set(chat + responses) == {chat[0]}
    # Arguments that were cut off are no JSON, and Messages has objects only: those that had come.
    assert {(each.text, len(each.calls), each.generated_tokens, each.is_cut) for each in messages} == {
        (chat[0].text, len(chat[0].calls), max_tokens, True)
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_within_a_call_leaves_it_incomplete(server: LiveServer, stream: bool) -> None:
    body = asked(KEYS["3 text and call"], tools=[F])
    way = int(stream)
    with server.client() as client:
        chat = by_chat(client, body | {"stop": ['x"']})[way]
        reason = answered(client, CHAT, **body, stop=['x"'])["choices"][0]["finish_reason"]
        responses = by_responses(client, in_responses(body) | {"stop": ['x"']})[way]
        message = answered(client, MESSAGES, **in_messages(body), stop_sequences=['x"'])
        after = answered(client, MESSAGES, **in_messages(body), stop_sequences=["</tool"])
    assert reason == "stop"
    assert chat.calls == responses.calls == (("f", '{"'),)
    assert responses.is_cut
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", 'x"')
    # Its arguments had come.
    assert (after["stop_reason"], after["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize("stop", ['"name"', '"f"', "arguments"])
def test_a_stop_string_before_a_calls_arguments_leaks_no_markup(server: LiveServer, stop: str) -> None:
    body = asked(KEYS["20 required"], tools=[F], tool_choice="required", stop=[stop])
    with server.client() as client:
        choice = answered(client, CHAT, **body)["choices"][0]
        responses = by_responses(client, in_responses(body) | {"stop": [stop]})
    assert choice["finish_reason"] == "stop"
    assert not choice["message"]["content"]
    assert not choice["message"].get("tool_calls")
    assert all(each.is_cut and not each.text and not each.calls for each in responses)


@pytest.mark.parametrize("name", ["only the end", "thought, text and call", "26 text after the call", "1 plain text"])
def test_log_probabilities_of_a_message_are_those_of_its_text(request: pytest.FixtureRequest, name: str) -> None:
    live = request.getfixturevalue("opened" if name in OPENED else "thinking" if name in THOUGHTS else "server")
    case = {**CASES, **THOUGHTS, **OPENED}[name]
    body = in_responses(asked(KEYS[name], **case.given)) | {"include": ["message.output_text.logprobs"]}
    with live.client() as client:
        output = answered(client, RESPONSES, **body)["output"]
        told = events(client, RESPONSES, **body)
    [part] = [part for item in output if item["type"] == "message" for part in item["content"]]
    # The tokens at its two ends may hold what is not its own.
    assert "".join(entry["token"] for entry in part["logprobs"]).strip() == part["text"].strip() == case.content
    deltas = [entry for event in told if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert deltas == part["logprobs"]


# --- any conversation -----------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn) -> list[Json]:
    """A system text, or none; turns of a user and an assistant, who may call a tool; then the user."""
    messages: list[Json] = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(WORDS)})
        calls = [
            {"id": f"call_{turn}_{number}", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            for number in range(draw(st.integers(0, 2)))
        ]
        if not calls:
            messages.append({"role": "assistant", "content": draw(WORDS)})
            continue
        messages.append({"role": "assistant", "content": draw(WORDS), "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": draw(WORDS)} for call in calls]
        messages.append({"role": "assistant", "content": draw(WORDS)})
    return [*messages, {"role": "user", "content": draw(WORDS)}]


@given(
    conversation=conversations(),
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    max_tokens=st.integers(1, 12),
    has_tools=st.booleans(),
)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_seed_gives_one_answer_in_all_dialects(
    server: LiveServer, conversation: list[Json], seed: int, temperature: float, max_tokens: int, has_tools: bool
) -> None:
    body: Json = {"messages": conversation, "seed": seed, "temperature": temperature, "max_tokens": max_tokens}
    tools = {"tools": [function("f", {"type": "object", "properties": {"x": {"type": "integer"}}}, description="F.")]}
    with server.client() as client:
        said = answers(client, body | (tools if has_tools else {}))
    assert len(said) == 6
    assert set(said) == {said[0]}


def test_a_strict_schema_that_cannot_be_enforced_is_named_as_the_dialect_names_it(server: LiveServer) -> None:
    bad = function("bad", {"type": "object", "properties": {"x": {"not": {}}}}, strict=True)
    body = asked(KEYS["1 plain text"], tools=[F, bad])
    with server.client() as client:
        responses = client.post(RESPONSES, json=in_responses(body)).json()["error"]
        messages = client.post(MESSAGES, json=in_messages(body)).json()["error"]
    assert responses["param"] == "tools[1].parameters"
    assert "'bad'" in responses["message"]
    assert messages["message"] == responses["message"]
