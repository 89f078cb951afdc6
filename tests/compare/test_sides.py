"""Each dialect against a real server on loopback; the live Ostro ones are in test_live.py."""

import json
import socket
from collections.abc import Callable, Sequence

import pytest
from stub_server import DONE, Asked, Reply, event, stub_server, tgi

from ostro.errors import BadRequest, ModelNotFound, OstroError, Unreachable
from ostro.measure.compare.answers import Answer, Failure, Outcome, Prompt, Token
from ostro.measure.compare.sides import Side, SideOptions, side_of
from ostro.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=3, temperature=0.7, top_p=0.9, seed=7, stop=("END", "\n"), logprobs=0)
CHAT: Prompt = ({"role": "user", "content": "Hello"},)


def ask(side: Side, prompts: Sequence[Prompt], params: SamplingParams = GREEDY) -> list[Outcome]:
    side.check(prompts, params)
    side.prepare()
    side.open()
    found = dict(side.answers(prompts, params, concurrency=2))
    side.close()
    return [found[index] for index in range(len(prompts))]


def openai(*events: bytes, cut: bool = False) -> Callable[[Asked], Reply]:
    def answer(asked: Asked) -> Reply:
        return Reply({"data": [{"id": "m"}]}) if asked.path == "/v1/models" else Reply(events=events, cut=cut)

    return answer


def text_event(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason, "logprobs": None}]})


# --- OpenAI ---------------------------------------------------------------------------------------------------------


def test_openai_fields_are_sent_as_they_are_called_there() -> None:
    with stub_server(openai(text_event("x", "stop"), DONE)) as stub:
        side = side_of(stub.url, SideOptions(key="sk-1"))
        ask(side, ["Hello"], SAMPLED)
        ask(side, [CHAT], SAMPLED)
    common = {
        "model": "m",
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["END", "\n"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert [(each.path, each.body, each.key) for each in stub.asked] == [
        ("/v1/models", None, "Bearer sk-1"),
        ("/v1/completions", {**common, "prompt": "Hello", "logprobs": 1}, "Bearer sk-1"),
        ("/v1/chat/completions", {**common, "messages": list(CHAT), "logprobs": True}, "Bearer sk-1"),
    ]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1(suffix: str) -> None:
    with stub_server(openai(text_event("x", "stop"), DONE)) as stub:
        ask(side_of(stub.url + suffix, SideOptions(model="given")), ["Hello"])
    assert [(each.path, each.body["model"], each.key) for each in stub.asked] == [("/v1/completions", "given", None)]


def test_a_completion_is_gathered_from_its_events() -> None:
    logprobs = {"tokens": ["a", "bytes:\\xf0"], "token_logprobs": [-0.5, None], "top_logprobs": None}
    events = (
        b": ping\n\n",
        event({"choices": [{"text": "a", "finish_reason": None, "logprobs": logprobs}]}),
        text_event("b"),
        text_event("", "length"),
        event({"choices": [], "usage": {"completion_tokens": 9}}),
        DONE,
    )
    with stub_server(openai(*events)) as stub:
        [found] = ask(side_of(stub.url, SideOptions()), ["Hello"])
    assert isinstance(found, Answer)
    assert (found.text, found.finish_reason, found.num_tokens, len(found.arrivals)) == ("ab", "length", 9, 2)
    assert found.tokens == (Token("a", None, -0.5), Token("bytes:\\xf0", None, None))
    assert found.seconds >= found.arrivals[-1] >= found.arrivals[0] > 0


def test_a_chat_answer_holds_its_reasoning_too() -> None:
    def delta(delta: dict[str, object], reason: str | None = None, **more: object) -> bytes:
        return event({"choices": [{"delta": delta, "finish_reason": reason, **more}]})

    logprobs = {"content": [{"token": "\ufffd", "logprob": -1, "bytes": [240, 159]}, {"token": "y", "logprob": -2}]}
    events = (
        delta({"role": "assistant", "content": ""}),
        delta({"reasoning_content": "Hm."}),
        delta({"content": "yes"}, logprobs=logprobs),
        delta({"content": None}, "stop"),
        DONE,
    )
    with stub_server(openai(*events)) as stub:
        [found] = ask(side_of(stub.url, SideOptions()), [CHAT])
    assert isinstance(found, Answer)
    assert (found.text, len(found.arrivals)) == ("Hm.yes", 2)
    assert found.tokens == (Token("bytes:\\xf0\\x9f", None, -1.0), Token("y", None, -2.0))


def test_a_stream_may_end_without_done() -> None:
    with stub_server(openai(text_event("x"), text_event("", "stop"))) as stub:
        [found] = ask(side_of(stub.url, SideOptions()), ["Hello"])
    assert isinstance(found, Answer)


DIED = event({"error": {"message": "engine\ndied", "type": "server_error"}})


@pytest.mark.parametrize(
    ("events", "cut", "told"),
    [
        ((text_event("x"),), True, "broke off"),
        ((text_event("x"), DONE), False, "without a finish reason"),
        ((text_event("x"), DIED, DONE), False, "engine died"),
        ((event({"error": "plain words"}),), False, "plain words"),
        ((b"data: {half\n\n",), False, "not JSON: {half"),
        ((b"data: [1]\n\n",), False, "not a JSON object: [1]"),
        ((b"data: " + b"[" * 200_000 + b"\n\n",), False, "not JSON"),
        ((event({"choices": "none"}), event({"choices": [None]}), event({"usage": 1}), DONE), False, "finish reason"),
    ],
)
def test_a_stream_that_goes_wrong_is_a_failure_with_its_reason(
    events: tuple[bytes, ...], told: str, *, cut: bool
) -> None:
    with stub_server(openai(*events, cut=cut)) as stub:
        [found] = ask(side_of(stub.url, SideOptions()), ["Hello"])
    assert isinstance(found, Failure)
    assert told in found.error
    assert "\n" not in found.error


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"error": {"message": "Too long.", "code": None}}, "HTTP 400: Too long."),
        ({"detail": "Unexpected fields"}, "HTTP 400: Unexpected fields"),
        ({"error": "bad", "error_type": "validation"}, "HTTP 400: bad"),
        ({"other": 1}, "HTTP 400: {'other': 1}"),
        ("x" * 5000, "HTTP 400: " + "x" * 500 + "…"),
    ],
)
def test_an_error_is_reported_in_the_servers_words(body: object, told: str) -> None:
    with stub_server(lambda asked: Reply(body, status=400)) as stub:
        [found] = ask(side_of(stub.url, SideOptions(model="m")), ["Hello"])
    assert isinstance(found, Failure)
    assert found.error == told


def test_one_failure_leaves_the_others() -> None:
    def answer(asked: Asked) -> Reply:
        if asked.body["prompt"] == "bad":
            return Reply({"error": {"message": "no"}}, status=500)
        return Reply(events=[text_event(asked.body["prompt"].upper(), "stop"), DONE])

    with stub_server(answer) as stub:
        found = ask(side_of(stub.url, SideOptions(model="m")), ["a", "bad", "b", "c"])
    assert [each.text if isinstance(each, Answer) else each.error for each in found] == ["A", "HTTP 500: no", "B", "C"]


def test_an_unreachable_server_is_reported() -> None:
    with stub_server(openai()) as stub:
        pass
    with pytest.raises(Unreachable, match=r"cannot be reached.*Is the server up"):
        side_of(stub.url, SideOptions()).prepare()
    [found] = ask(side_of(stub.url, SideOptions(model="m")), ["Hello"])
    assert isinstance(found, Failure)


@pytest.mark.parametrize("reply", [Reply({"data": []}), Reply([]), Reply({"error": "no"}, status=404)])
def test_a_server_that_lists_no_model_wants_one_named(reply: Reply) -> None:
    with stub_server(lambda asked: reply) as stub, pytest.raises(ModelNotFound, match="--model-a"):
        side_of(stub.url, SideOptions()).prepare()


def test_a_silent_server_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        [found] = ask(side_of(url, SideOptions(model="m", timeout=0.2)), ["Hello"])
    assert isinstance(found, Failure)
    assert "silent for 0.2 s" in found.error


def test_a_server_without_tls_behind_https_is_reported() -> None:
    with stub_server(openai()) as stub:
        [found] = ask(side_of(stub.url.replace("http", "https"), SideOptions(model="m", timeout=5)), ["Hello"])
    assert isinstance(found, Failure)
    assert "cannot be reached" in found.error


# --- TGI ------------------------------------------------------------------------------------------------------------

WORDS = [(11, " the"), (12, " lazy"), (13, " dog")]


def test_tgi_returns_text_tokens_and_logprobs() -> None:
    with stub_server(tgi(WORDS)) as stub:
        side = side_of("tgi+" + stub.url, SideOptions())
        [found] = ask(side, ["Hello"])
    assert side.model == "org/tiny"
    assert isinstance(found, Answer)
    assert (found.text, found.finish_reason, found.num_tokens) == (" the lazy dog", "length", 3)
    assert found.tokens == (Token(" the", 11, -0.25), Token(" lazy", 12, -0.5), Token(" dog", 13, -0.75))
    assert len(found.arrivals) == 3


def test_tgi_fields_are_mapped() -> None:
    with stub_server(tgi(WORDS)) as stub:
        side = side_of("tgi+" + stub.url, SideOptions(key="k"))
        found = [*ask(side, ["Hello"], GREEDY), *ask(side, ["Hello"], SAMPLED)]
    assert all(isinstance(each, Answer) for each in found)
    shared = {"max_new_tokens": 3, "details": True, "return_full_text": False}
    assert [(each.body["inputs"], each.body["parameters"]) for each in stub.asked if each.body] == [
        ("Hello", {**shared, "do_sample": False}),
        ("Hello", {**shared, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 7, "stop": ["END", "\n"]}),
    ]
    assert {each.key for each in stub.asked} == {"Bearer k"}


def test_tgi_leaves_the_stop_in_its_text_and_we_do_not() -> None:
    with stub_server(tgi([(1, "so"), (2, "END")], stops="stop_sequence")) as stub:
        [found] = ask(side_of("tgi+" + stub.url, SideOptions()), ["Hello"], SAMPLED)
    assert isinstance(found, Answer)
    assert (found.text, found.finish_reason) == ("so", "stop")


def test_tgis_special_tokens_are_no_text() -> None:
    last = {"id": 2, "text": "</s>", "logprob": -1, "special": True}
    told = {"token": last, "generated_text": "so", "details": {"finish_reason": "eos_token", "generated_tokens": 2}}
    events = [b"data:" + json.dumps({"token": {"id": 1, "text": "so", "logprob": -1}}).encode() + b"\n\n", event(told)]
    with stub_server(lambda asked: Reply(events=events)) as stub:
        side = side_of("tgi+" + stub.url, SideOptions())
        found = dict(side.answers(["Hello"], GREEDY, concurrency=1))[0]
    assert isinstance(found, Answer)
    assert (found.text, found.finish_reason, [token.id for token in found.tokens]) == ("so", "stop", [1, 2])


# --- what a side cannot express -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "prompt", "params", "param"),
    [
        ("tgi+http://localhost:1", CHAT, GREEDY, "messages"),
        ("tgi+http://localhost:1", "x", GREEDY.with_changes(seed=0), "seed"),
        ("tgi+http://localhost:1", "x", GREEDY.with_changes(max_tokens=0), "max_tokens"),
        ("ostro+http://localhost:1", CHAT, GREEDY, "messages"),
        ("ostro+http://localhost:1", "x", GREEDY.with_changes(logprobs=0), "logprobs"),
    ],
)
def test_what_a_dialect_cannot_express_is_refused_by_name(
    reference: str, prompt: Prompt, params: SamplingParams, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        side_of(reference, SideOptions()).check([prompt], params)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "reference",
    [
        "ftp://host",
        "grpc+http://host",
        "http://",
        "http://host:port",
        "http://user:secret@host",
        "http://host/?key=1",
        "offline:x?colour=red",
        "offline:x?threads=many",
        "offline:x?dtype=float7",
        "offline:x?hrm_dialect=latin",
        "offline:x?hrm_steps=few",
        "offline:x?hrm_steps=0",
        "offline:x?hrm_halting=perhaps",
    ],
)
def test_a_reference_that_means_nothing_is_refused(reference: str) -> None:
    with pytest.raises(BadRequest) as caught:
        side_of(reference, SideOptions())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("reference", ["offline:default", "tgi+http://host:1"])
def test_a_models_name_is_refused_where_none_can_be_chosen(reference: str) -> None:
    with pytest.raises(BadRequest):
        side_of(reference, SideOptions(model="m"))


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(BadRequest) as caught:
        side_of("http://host", SideOptions(key=key))
    assert key not in str(caught.value)


def test_a_key_is_not_shown() -> None:
    assert "sk-1" not in repr(SideOptions(key="sk-1"))


def test_a_missing_model_is_reported_before_anything_runs() -> None:
    with pytest.raises(OstroError, match="no file or directory"):
        side_of("offline:./no-such-model", SideOptions()).prepare()
