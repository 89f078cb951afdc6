import json

import pytest

from ostro.errors import BadRequest, ContextLengthExceeded, Unsupported
from ostro.sampling_params import SamplingParams
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.completions import CompletionRequest
from ostro.schemas.embeddings import EmbeddingRequest
from ostro.schemas.wire import ErrorBody, RequestModel, parse

Generation = type[CompletionRequest] | type[ChatCompletionRequest]

HELLO = [{"role": "user", "content": "Hello"}]
LEAST: dict[type[RequestModel], dict[str, object]] = {
    CompletionRequest: {"prompt": "Hello"},
    ChatCompletionRequest: {"messages": HELLO},
    EmbeddingRequest: {"input": "Hello"},
}


def completion(**fields: object) -> CompletionRequest:
    return parse(CompletionRequest, {"prompt": "Hello"} | fields)


def chat(**fields: object) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, {"messages": HELLO} | fields)


def message(**fields: object) -> dict[str, object]:
    return chat(messages=[fields]).template_messages()[0]


def settings(schema: Generation, fields: dict[str, object]) -> SamplingParams:
    return parse(schema, LEAST[schema] | fields).sampling_params()


def refused(schema: Generation, **fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        settings(schema, fields)
    return caught.value


# --- what is let in -------------------------------------------------------------------------------------------------


def test_minimal_completion_request_has_openais_defaults() -> None:
    request = completion()
    assert (request.model, request.echo, request.stream) == ("default", False, False)
    assert request.sampling_params() == SamplingParams(max_tokens=None, default_max_tokens=16)


def test_minimal_chat_request_generates_what_fits() -> None:
    assert chat().sampling_params() == SamplingParams(max_tokens=None)


@pytest.mark.parametrize("schema", LEAST)
def test_null_means_default_in_every_field(schema: type[RequestModel]) -> None:
    nulls = dict.fromkeys([*schema.model_fields, *schema.ignored, *schema.unserved])
    assert parse(schema, nulls | LEAST[schema]) == parse(schema, LEAST[schema])


def test_every_setting_reaches_the_sampler() -> None:
    fields: dict[str, object] = {
        "n": 3,
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "logit_bias": {"7": -100, "8": 1.5},
        "bad_words": ["no"],
        "seed": -5,
        "stop": ["\n", "END"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
    }
    expected = SamplingParams(
        n=3,
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={7: -100, 8: 1.5},
        bad_words=("no",),
        seed=-5,
        stop=("\n", "END"),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        skip_special_tokens=False,
        include_stop_in_output=True,
    )
    own = {"include_stop_str_in_output": True}
    assert completion(**fields, **own, logprobs=2).sampling_params() == expected
    assert chat(**fields, **own, logprobs=True, top_logprobs=2).sampling_params() == expected


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_come_in_four_forms(given: object, prompts: object) -> None:
    assert completion(prompt=given).prompt == prompts
    assert parse(EmbeddingRequest, {"input": given}).input == prompts


def test_lone_stop_string_is_a_list_of_one() -> None:
    assert completion(stop="\n\n").sampling_params().stop == ("\n\n",)


def test_zero_tokens_are_legal_for_completions_only() -> None:
    assert completion(max_tokens=0, echo=True).sampling_params().max_tokens == 0
    assert refused(ChatCompletionRequest, max_tokens=0).param == "max_tokens"


def test_max_completion_tokens_is_honoured() -> None:
    assert chat(max_completion_tokens=5).sampling_params().max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).sampling_params().max_tokens == 5
    assert refused(ChatCompletionRequest, max_completion_tokens=5, max_tokens=6).param == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"logprobs": 3}, (3, None)),
        ({"logprobs": 3, "echo": True}, (3, 3)),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 5}, (3, 5)),
        ({"echo": True}, (None, None)),
        ({"logprobs": 0, "echo": True}, (0, 0)),
    ],
)
def test_echo_asks_for_the_prompts_log_probabilities(fields: dict[str, object], wanted: object) -> None:
    params = completion(**fields).sampling_params()
    assert (params.logprobs, params.prompt_logprobs) == wanted


def test_chat_logprobs_without_alternatives_are_of_the_chosen_tokens() -> None:
    assert chat(logprobs=True).sampling_params().logprobs == 0
    assert chat(logprobs=False).sampling_params().logprobs is None


@pytest.mark.parametrize("schema", [CompletionRequest, ChatCompletionRequest])
def test_fields_that_cannot_change_the_output_are_accepted(schema: type[RequestModel]) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    assert parse(schema, LEAST[schema] | harmless | {"safety_identifier": "x"}) == parse(schema, LEAST[schema])


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"functions": []},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_asking_for_nothing_special_is_accepted(fields: dict[str, object]) -> None:
    assert chat(**fields).sampling_params() == chat().sampling_params()


def test_empty_suffix_and_equal_best_of_are_accepted() -> None:
    assert completion(suffix="", best_of=2, n=2).n == 2


# --- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_message_reaches_the_template_as_it_was_sent(role: str) -> None:
    assert message(role=role, content="Hi", name="n") == {"role": role, "content": "Hi", "name": "n"}


def test_developer_speaks_as_the_system() -> None:
    assert message(role="developer", content="Be kind.") == {"role": "system", "content": "Be kind."}


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message(role="user", content=parts)["content"] == parts


def test_answer_of_the_api_can_be_sent_back() -> None:
    answer: dict[str, object] = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    assert message(**answer, tool_calls=None) == {"role": "assistant", "content": "Hi"}


def test_tool_calls_need_no_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent = message(role="assistant", content=None, tool_calls=[call])
    assert sent == {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "messages[0].content"),
        ({"content": "Hi"}, "messages[0].role"),
        ({"role": "wizard", "content": "Hi"}, "messages[0].role"),
        ({"role": "user", "content": "Hi", "mood": "good"}, "messages[0].mood"),
        ({"role": "assistant", "content": "Hi", "audio": {"id": "a"}}, "messages[0].audio"),
        ("Hi", "messages[0]"),
    ],
)
def test_bad_message_is_refused_by_its_place(bad: object, param: str) -> None:
    error = refused(ChatCompletionRequest, messages=[bad])
    assert error.param == param
    assert error.message.startswith(param)


def test_conversation_needs_a_message() -> None:
    assert refused(ChatCompletionRequest, messages=[]).param == "messages"


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("n", "2"),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop", ["x" * 1025]),
        ("stop", 5),
        ("stop", [["x"]]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("bad_words", [""]),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("logit_bias", [1]),
        ("prompt_logprobs", 21),
        ("cache_salt", "x" * 257),
        ("priority", 2**31),
        ("ignore_eos", "yes"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_field_out_of_range_is_refused_by_name(schema: Generation, name: str, value: object) -> None:
    error = refused(schema, **{name: value})
    assert (error.http_status, error.openai_type) == (400, "invalid_request_error")
    assert error.param is not None
    assert error.param.split("[")[0] == name
    assert error.message.startswith(name)
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 21),
        ("logprobs", True),
        ("best_of", 2),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", ["a"] * 2049),
        ("messages", HELLO),
        ("max_completion_tokens", 5),
    ],
)
def test_completions_own_fields_are_checked(name: str, value: object) -> None:
    assert refused(CompletionRequest, **{name: value}).param == name


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": -1, "logprobs": True},
        {"top_logprobs": 2},
        {"top_logprobs": 2, "logprobs": False},
        {"logprobs": 5},
        {"max_completion_tokens": 0},
        {"prompt": "Hello"},
        {"echo": True},
    ],
)
def test_chats_own_fields_are_checked(fields: dict[str, object]) -> None:
    assert refused(ChatCompletionRequest, **fields).param == next(iter(fields))


def test_choices_of_one_request_are_bounded() -> None:
    assert refused(CompletionRequest, prompt=["a"] * 17, n=128).param == "n"


@pytest.mark.parametrize(
    ("schema", "name", "value"),
    [
        (CompletionRequest, "suffix", "the end"),
        (ChatCompletionRequest, "functions", [{"name": "f"}]),
        (ChatCompletionRequest, "modalities", ["text", "audio"]),
        (ChatCompletionRequest, "audio", {"voice": "v", "format": "wav"}),
        (ChatCompletionRequest, "function_call", {"name": "f"}),
        (ChatCompletionRequest, "web_search_options", {}),
    ],
)
def test_unsupported_field_is_refused_by_name(schema: Generation, name: str, value: object) -> None:
    error = refused(schema, **{name: value})
    assert isinstance(error, Unsupported)
    assert (error.param, error.message) == (name, f"{name} is not supported.")


@pytest.mark.parametrize("schema", LEAST)
def test_unknown_field_is_refused_by_name(schema: type[RequestModel]) -> None:
    with pytest.raises(BadRequest, match="temprature is not a known field") as caught:
        parse(schema, LEAST[schema] | {"temprature": 0.5})
    assert caught.value.param == "temprature"


@pytest.mark.parametrize(("schema", "param"), [(CompletionRequest, "prompt"), (ChatCompletionRequest, "messages")])
def test_missing_field_is_asked_for(schema: type[RequestModel], param: str) -> None:
    with pytest.raises(BadRequest, match=f"{param} is required") as caught:
        parse(schema, {})
    assert caught.value.param == param


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_body_that_is_not_an_object_is_refused(body: object) -> None:
    with pytest.raises(BadRequest, match="The request must be a JSON object") as caught:
        parse(CompletionRequest, body)
    assert caught.value.param is None


@pytest.mark.parametrize(
    ("name", "value"), [("encoding_format", "int8"), ("dimensions", 0), ("input", {}), ("input", [])]
)
def test_embedding_fields_are_checked(name: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(EmbeddingRequest, LEAST[EmbeddingRequest] | {name: value})
    assert caught.value.param == name


def test_error_body_has_all_four_keys() -> None:
    body = ErrorBody.of(ContextLengthExceeded(limit=8, prompt=9, output=0)).model_dump_json()
    error = json.loads(body)["error"]
    assert error.pop("message").startswith("This model's maximum context length is 8 tokens")
    assert error == {"type": "invalid_request_error", "param": "prompt", "code": "context_length_exceeded"}
    assert json.loads(ErrorBody.of(BadRequest("no")).model_dump_json())["error"]["code"] is None
