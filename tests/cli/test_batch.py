import base64
import io
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from model_directory import CONTEXT, HIDDEN, make_embedding_model, write_model
from safetensors.torch import load_file, save_file

from ostro import LLM, SamplingParams
from ostro.cli import main
from ostro.config import EngineConfig

Json = dict[str, Any]
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding_model(write_model(tmp_path_factory.mktemp("models") / "vectors"))


def line(url: str, custom_id: str, **body: object) -> Json:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


class Batch:
    """Runs lines, requests or raw text, through the command."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.input, self.output = directory / "requests.jsonl", directory / "results.jsonl"
        self.model = model
        self.status: int | None = None

    def __call__(self, *lines: Json | str) -> list[Json]:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
        self.input.write_text("\n".join(texts) + "\n", encoding="utf-8")
        self.status = main(
            ["batch", str(self.input), "--output", str(self.output), "--model", str(self.model), "--threads", "1"]
        )
        return [json.loads(text) for text in self.output.read_text(encoding="utf-8").split("\n")[:-1]]

    def body(self, url: str, **fields: object) -> Json:
        """The answer to one request that succeeds."""
        [result] = self(line(url, "one", **fields))
        assert (self.status, result["response"]["status_code"], result["error"]) == (0, 200, None), result
        body: Json = result["response"]["body"]
        return body

    def refusal(self, url: str, **fields: object) -> Json:
        """The error of one request that does not, with its status."""
        [result] = self(line(url, "one", **fields))
        assert (self.status, result["error"]) == (1, None), result
        error: Json = result["response"]["body"]["error"]
        return error | {"status": result["response"]["status_code"]}


@pytest.fixture
def batch(tmp_path: Path, model: Path) -> Batch:
    return Batch(tmp_path, model)


@pytest.fixture
def vectors(tmp_path: Path, embedding_model: Path) -> Batch:
    return Batch(tmp_path, embedding_model)


# --- the file as a whole --------------------------------------------------------------------------------------------


def test_good_and_bad_lines_mixed_each_get_their_own_result_in_order(
    batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = batch(
        line(COMPLETIONS, "a", prompt=PROMPT, max_tokens=4),
        "{not json",
        line(CHAT, "b", messages=[{"role": "user", "content": "hi"}], max_tokens=4),
        line(COMPLETIONS, "c", prompt=PROMPT, temperature=3),
        line(COMPLETIONS, "a", prompt=PROMPT),
        "",
        line("/v1/audio/speech", "d", input="hi"),
        {"method": "POST", "url": COMPLETIONS, "body": {"prompt": "x"}},
        line(COMPLETIONS, "e", prompt="x", model="gpt-4"),
        line(COMPLETIONS, "f", prompt="x" * 9 * CONTEXT),
        {"custom_id": "g", "method": "GET", "url": COMPLETIONS, "body": {"prompt": "x"}},
        {"custom_id": "h", "method": "POST", "url": COMPLETIONS, "body": "x"},
        "[1]",
        line(COMPLETIONS, "i", prompt=[1, 2, 3], max_tokens=2),
    )
    outcomes = [
        (each["custom_id"], each["error"]["code"] if each["error"] else each["response"]["status_code"])
        for each in results
    ]
    assert outcomes == [
        ("a", 200),
        (None, "invalid_json_line"),
        ("b", 200),
        ("c", 400),
        ("a", "duplicate_custom_id"),
        ("d", "invalid_url"),
        (None, "invalid_custom_id"),
        ("e", 404),
        ("f", 400),
        ("g", "invalid_method"),
        ("h", "invalid_body"),
        (None, "invalid_request"),
        ("i", 200),
    ]
    assert batch.status == 1
    assert capsys.readouterr().err.endswith("3 completed, 10 failed\n")
    assert all(each.keys() == {"id", "custom_id", "response", "error"} for each in results)
    assert len({each["id"] for each in results}) == len(results)
    assert results[1]["error"]["message"].startswith("Line 2 is not valid JSON")
    assert results[3]["response"]["body"]["error"].keys() == {"message", "type", "param", "code"}


def test_file_without_failures_ends_with_status_zero(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    batch(line(COMPLETIONS, "a", prompt="x"), line(COMPLETIONS, "b", prompt="y"))
    assert batch.status == 0
    assert capsys.readouterr().err.endswith("2 completed, 0 failed\n")


def test_requests_run_together_give_what_each_gives_alone(batch: Batch, model: Path) -> None:
    prompts = [f"{PROMPT} {word}" for word in ("jumps", "over", "the", "lazy", "dog")]
    settings = [{"max_tokens": 12, "seed": number, "temperature": number / 4} for number in range(len(prompts))]
    results = batch(
        *(line(COMPLETIONS, prompt, prompt=prompt, **fields) for prompt, fields in zip(prompts, settings, strict=True))
    )
    llm = LLM(model, EngineConfig(threads=1))
    for prompt, fields, result in zip(prompts, settings, results, strict=True):
        alone = llm.generate([prompt], SamplingParams(**fields))[0]  # type: ignore[arg-type]
        assert result["response"]["body"]["choices"][0]["text"] == alone.text


def test_file_from_windows_and_separators_within_strings_are_read(batch: Batch) -> None:
    separated = json.dumps(line(COMPLETIONS, "b", prompt="x\u2028y"), ensure_ascii=False)
    assert "\u2028" in separated
    results = batch("\ufeff" + json.dumps(line(COMPLETIONS, "a", prompt="x")) + "\r", separated)
    assert [each["custom_id"] for each in results] == ["a", "b"]
    assert batch.status == 0


def test_results_go_to_standard_output_from_standard_input(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(line(COMPLETIONS, "one", prompt="x"))))
    assert main(["batch", "-", "--model", str(model), "--threads", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["response"]["status_code"] == 200


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_file_without_requests_is_refused_and_the_old_results_stay(
    batch: Batch, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.output.write_text("{}\n")
    assert batch(text) == [{}]
    assert batch.status == 2
    assert "holds no requests" in capsys.readouterr().err


def test_output_that_cannot_be_written_leaves_nothing_behind(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.input.write_text(json.dumps(line(COMPLETIONS, "one", prompt="x")))
    target = tmp_path / "missing" / "results.jsonl"
    assert main(["batch", str(batch.input), "--output", str(target), "--model", str(batch.model)]) == 2
    assert "Cannot write" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [batch.input.name]


def test_one_sequence_that_fails_is_one_failed_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_model(tmp_path / "broken")
    weights = load_file(directory / "model.safetensors")
    # One token's embedding is not a number: only prompts that hold it fail.
    weights["model.embed_tokens.weight"][1] = torch.nan
    save_file(weights, directory / "model.safetensors")
    batch = Batch(tmp_path, directory)
    bad, good = batch(
        line(COMPLETIONS, "a", prompt=[1], max_tokens=2), line(COMPLETIONS, "b", prompt=[2], max_tokens=2)
    )
    assert (bad["response"]["status_code"], good["response"]["status_code"]) == (500, 200)
    assert bad["response"]["body"]["error"]["code"] == "sequence_failed"
    assert "1 completed, 1 failed" in capsys.readouterr().err


# --- completions ----------------------------------------------------------------------------------------------------


def test_completion_has_openais_shape(batch: Batch) -> None:
    body = batch.body(COMPLETIONS, prompt=PROMPT, temperature=0)
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1.7e9
    [choice] = body.pop("choices")
    usage = body.pop("usage")
    assert body == {"object": "text_completion", "model": "tiny"}
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "prompt_logprobs"}
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_choices_are_numbered_prompt_by_prompt(batch: Batch) -> None:
    body = batch.body(COMPLETIONS, prompt=["the", "lazy dog"], n=2, max_tokens=3, echo=True, ignore_eos=True)
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [text.startswith("the") for text in texts] == [True, True, False, False]
    assert [text.startswith("lazy dog") for text in texts] == [False, False, True, True]
    assert body["usage"]["completion_tokens"] == 12


def test_scoring_request_of_the_evaluation_harness_is_answered_as_it_expects(batch: Batch, model: Path) -> None:
    ids = LLM(model, EngineConfig(threads=1)).tokenizer.encode(PROMPT)
    body = batch.body(COMPLETIONS, prompt=[ids], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234)
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    assert {len(array) for array in logprobs.values()} == {len(ids) + 1}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    # The generated token is the greedy one, and equals the best alternative exactly.
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    assert "".join(logprobs["tokens"][:-1]) == PROMPT
    assert choice["text"].startswith(PROMPT)


def test_log_probabilities_are_the_facades(batch: Batch, model: Path) -> None:
    body = batch.body(COMPLETIONS, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["top_logprobs"]) == (PROMPT, "length", None)
    scored = LLM(model, EngineConfig(threads=1)).score(["the"], [PROMPT.removeprefix("the")])[0]
    assert sum(choice["logprobs"]["token_logprobs"][1:]) == pytest.approx(scored.logprob, abs=1e-4)


def test_token_offsets_point_into_the_text(batch: Batch) -> None:
    [choice] = batch.body(COMPLETIONS, prompt=PROMPT, max_tokens=8, echo=True, logprobs=0, temperature=0)["choices"]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith(("bytes:", "<|")) or choice["text"].startswith(token, offset)


def test_stop_string_ends_the_text_and_usage_counts_what_was_generated(batch: Batch) -> None:
    fields: Json = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    [free] = batch.body(COMPLETIONS, **fields)["choices"]
    tokens = free["logprobs"]["tokens"]
    stop = next(token for token in tokens[1:] if token.isascii() and not token.startswith("bytes:"))
    body = batch.body(COMPLETIONS, **fields, stop=stop)
    [stopped] = body["choices"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == free["text"][: free["text"].index(stop)]
    assert body["usage"]["completion_tokens"] == len(stopped["logprobs"]["tokens"]) < 8


def test_prompt_log_probabilities_are_given_by_token_id(batch: Batch, model: Path) -> None:
    ids = LLM(model, EngineConfig(threads=1)).tokenizer.encode(PROMPT)
    [choice] = batch.body(COMPLETIONS, prompt=PROMPT, max_tokens=1, prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for token, entry in zip(ids[1:], rest, strict=True):
        assert entry[str(token)]["rank"] >= 1
        assert {1, 2} <= {each["rank"] for each in entry.values()}


def test_shared_prefix_is_counted_as_cached_unless_salted_apart(batch: Batch) -> None:
    long = " ".join([PROMPT] * 8)
    results = batch(
        line(COMPLETIONS, "a", prompt=long + " and", max_tokens=1),
        line(COMPLETIONS, "b", prompt=long + " not", max_tokens=1),
        line(COMPLETIONS, "c", prompt=long + " not", max_tokens=1, cache_salt="c"),
    )
    cached = [each["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for each in results]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


# --- chat -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_chat_with_a_prediction_gives_the_same_answer(batch: Batch) -> None:
    body: Json = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "temperature": 0}
    plain = batch.body(CHAT, **body)
    text = plain["choices"][0]["message"]["content"]
    predicted = batch.body(CHAT, **body, prediction={"type": "content", "content": text})
    assert predicted["choices"] == plain["choices"]
    # How many are tried depends on what steps cost here.
    details = predicted["usage"]["completion_tokens_details"]
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}


def test_chat_completion_has_openais_shape(batch: Batch, model: Path) -> None:
    messages: list[Json] = [
        {"role": "system", "content": "no"},
        {"role": "user", "content": [{"type": "text", "text": "the fox"}]},
    ]
    body = batch.body(CHAT, messages=messages, max_completion_tokens=5, temperature=0, logprobs=True, top_logprobs=2)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    alone = LLM(model, EngineConfig(threads=1)).chat(messages, SamplingParams(max_tokens=5, temperature=0))
    assert choice["message"] == {"role": "assistant", "content": alone.text, "refusal": None}
    assert choice["finish_reason"] == alone.choices[0].finish_reason
    assert choice["logprobs"]["refusal"] is None
    entries = choice["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"] == alone.num_generated
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in entries)


# Short, for a model of a short context: Qwen's way to show tools and calls.
TOOLS = """\
{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"""


@pytest.mark.full
def test_structured_outputs_are_as_over_http(batch: Batch) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    messages = [{"role": "user", "content": PROMPT}]
    chosen = batch.body(CHAT, messages=messages, response_format=format, max_tokens=30)
    assert json.loads(chosen["choices"][0]["message"]["content"]) in ("red", "blue")
    assert batch.body(COMPLETIONS, prompt=PROMPT, guided_choice=["yes", "no"])["choices"][0]["text"] in ("yes", "no")
    refusal = batch.refusal(COMPLETIONS, prompt=PROMPT, guided_json={"not": {}})
    assert (refusal["status"], refusal["param"]) == (400, "guided_json")


COLOUR = {"enum": ["red", "blue"]}


@pytest.mark.full
def test_tools_are_as_over_http(tmp_path: Path) -> None:
    batch = Batch(tmp_path, write_model(tmp_path / "caller", chat_template=TOOLS))
    messages = [{"role": "user", "content": PROMPT}]
    parameters = {"type": "object", "properties": {"x": COLOUR}, "required": ["x"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    called = batch.body(CHAT, messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    [call] = called["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["x"] in ("red", "blue")
    assert (called["choices"][0]["message"]["content"], called["choices"][0]["finish_reason"]) == (None, "tool_calls")
    strict = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
    assert batch.refusal(CHAT, messages=messages, tools=[strict])["param"] == "tools[0].function.parameters"


def test_chat_without_a_limit_fills_the_context(batch: Batch) -> None:
    body = batch.body(CHAT, messages=[{"role": "user", "content": "hi"}], ignore_eos=True)
    assert body["usage"]["total_tokens"] == CONTEXT
    assert body["choices"][0]["finish_reason"] == "length"


def test_model_without_a_chat_template_says_what_to_set(tmp_path: Path) -> None:
    batch = Batch(tmp_path, write_model(tmp_path / "plain", chat_template=None))
    error = batch.refusal(CHAT, messages=[{"role": "user", "content": "hi"}])
    assert (error["status"], error["param"]) == (400, "messages")
    assert "chat_template" in error["message"]


# --- embeddings -----------------------------------------------------------------------------------------------------


def test_embeddings_are_the_facades_and_base64_says_the_same(vectors: Batch, embedding_model: Path) -> None:
    texts = ["the fox", "the lazy dog"]
    plain, packed = (
        each["response"]["body"]
        for each in vectors(
            line(EMBEDDINGS, "a", input=texts),
            line(EMBEDDINGS, "b", input=texts, encoding_format="base64", dimensions=HIDDEN),
        )
    )
    expected = LLM(embedding_model, EngineConfig(threads=1)).embed(texts)
    assert [entry["index"] for entry in plain["data"]] == [0, 1]
    for entry, coded, vector in zip(plain["data"], packed["data"], expected, strict=True):
        assert entry["embedding"] == pytest.approx(vector, abs=1e-5)
        assert math.hypot(*entry["embedding"]) == pytest.approx(1.0)
        numbers = struct.unpack(f"<{HIDDEN}f", base64.b64decode(coded["embedding"]))
        assert numbers == pytest.approx(entry["embedding"], abs=1e-6)
    assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] > 2


def test_dimensions_and_prompts_that_a_model_does_not_have_fail_their_lines(vectors: Batch) -> None:
    results = vectors(
        line(EMBEDDINGS, "a", input=PROMPT, dimensions=HIDDEN // 2),
        line(EMBEDDINGS, "b", input=PROMPT, prompt_name="query"),
    )
    errors = [each["response"]["body"]["error"] for each in results]
    assert [error["param"] for error in errors] == ["dimensions", "prompt_name"]


def test_other_dimensions_are_refused(vectors: Batch) -> None:
    error = vectors.refusal(EMBEDDINGS, input="x", dimensions=HIDDEN // 2)
    assert (error["status"], error["param"]) == (400, "dimensions")


def test_model_that_does_not_embed_says_so(batch: Batch) -> None:
    error = batch.refusal(EMBEDDINGS, input="x")
    assert (error["status"], error["code"]) == (400, "unsupported")
    assert "not an embedding model" in error["message"]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "tiny", None])
def test_loaded_model_goes_by_its_name_or_none(batch: Batch, name: str | None) -> None:
    assert batch.body(COMPLETIONS, prompt="x", model=name)["model"] == "tiny"


def test_other_model_is_not_found(batch: Batch) -> None:
    error = batch.refusal(CHAT, messages=[{"role": "user", "content": "hi"}], model="gpt-4")
    assert (error["status"], error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "stream": True}, "stream"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["x", "y" * 9 * CONTEXT]}, "prompt"),
    ],
)
def test_request_that_cannot_run_is_refused_by_the_field_at_fault(batch: Batch, fields: Json, param: str) -> None:
    error = batch.refusal(COMPLETIONS, **fields)
    assert (error["status"], error["type"], error["param"]) == (400, "invalid_request_error", param)
