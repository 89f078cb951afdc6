"""Structured outputs of the default model on the native core: what it writes validates, however it is run."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import jsonschema
import pytest
from guessed_drafts import EagerDrafts
from tool_templates import OPEN, QWEN

from ostro import LLM, EngineConfig, SamplingParams, StructuredOutput
from ostro.errors import BadRequest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "born": {"type": "string", "pattern": "^[12][0-9]{3}-[01][0-9]$"},
        "titles": {"type": "array", "items": {"enum": ["Dr", "Countess", "Professor"]}, "maxItems": 2},
        "address": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/address"}]},
    },
    "required": ["name", "age", "born", "titles", "address"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^\\d{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
PROMPT = "Ada Lovelace, the mathematician, as JSON:\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(config=EngineConfig(kv_memory=128 << 20, threads=1))
    yield made
    made.frontend.close()


def params(structured: StructuredOutput, **settings: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "temperature": 1.0, "seed": 7, "structured": structured} | settings)  # type: ignore[arg-type]


def checked(text: str) -> object:
    value = json.loads(text)
    jsonschema.validate(value, PERSON, format_checker=jsonschema.FormatChecker())
    return value


@pytest.mark.full
def test_drafts_change_nothing_within_a_structure(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt shows what an answer may look like: drafts come from there, and meet masks."""
    example = '{"name": "Ada", "age": 36, "born": "1815-12", "titles": ["Countess"], "address": {"zip": "12345"}}'
    asked = params(StructuredOutput.from_schema(PERSON), n=3, logprobs=0)
    prompts = [f"{example}\n{PROMPT}", f"{PROMPT}{example}\n"]
    told = []
    for drafts in (None, EagerDrafts()):
        monkeypatch.setattr(llm.core.scheduler, "speculation", drafts)
        before = llm.core.scheduler.counters.accepted_tokens
        found = llm.generate(prompts, asked)
        told.append([(each.token_ids, each.logprobs, each.finish_reason) for one in found for each in one.choices])
    assert told[0] == told[1]
    assert llm.core.scheduler.counters.accepted_tokens > before + 10


FORCED = pytest.mark.parametrize("jump_forward", [pytest.param(False, marks=pytest.mark.full), True])


@pytest.mark.full
@pytest.mark.parametrize(
    ("jump_forward", "settings"),
    [
        (False, {}),
        (True, {"temperature": 0.0}),
        (True, {"top_p": 0.9, "repetition_penalty": 1.1}),
        pytest.param(True, {}, marks=pytest.mark.full),
        pytest.param(False, {"temperature": 0.0}, marks=pytest.mark.full),
        pytest.param(False, {"top_p": 0.9, "repetition_penalty": 1.1}, marks=pytest.mark.full),
    ],
)
def test_every_choice_validates_against_its_schema(llm: LLM, jump_forward: bool, settings: dict[str, object]) -> None:
    asked = params(StructuredOutput.from_schema(PERSON, jump_forward=jump_forward), n=2, **settings)
    before = llm.core.scheduler.counters.forced_tokens
    [completion] = llm.generate(PROMPT, asked)
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        checked(choice.text)
    forced = llm.core.scheduler.counters.forced_tokens - before
    # Property names alone are dozens.
    assert forced > 40 if jump_forward else forced == 0


@FORCED
def test_alone_equals_batched_equals_streamed(llm: LLM, jump_forward: bool) -> None:
    asked = params(StructuredOutput.from_schema(PERSON, jump_forward=jump_forward))
    free = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
    [alone] = llm.generate(PROMPT, asked)
    together = llm.generate([PROMPT, "Once upon", PROMPT], [asked, free, asked.with_changes(seed=8)])
    assert together[0].choices[0].token_ids == alone.choices[0].token_ids
    assert together[2].choices[0].text != alone.choices[0].text
    assert together[1].num_generated == 30
    told = list(llm.stream(PROMPT, asked))
    assert "".join(delta.text for delta in told) == alone.choices[0].text
    assert [token for delta in told for token in delta.token_ids] == alone.choices[0].token_ids
    [awaited] = asyncio.run(llm.agenerate(PROMPT, asked))
    assert awaited.choices[0].text == alone.choices[0].text


@pytest.mark.full
@FORCED
def test_log_probabilities_are_the_models_own_and_those_of_forced_tokens_come_too(llm: LLM, jump_forward: bool) -> None:
    asked = params(StructuredOutput.from_schema(PERSON, jump_forward=jump_forward), logprobs=2)
    [completion] = llm.generate(PROMPT, asked)
    [choice] = completion.choices
    assert choice.logprobs is not None
    assert [each.token_id for each in choice.logprobs] == choice.token_ids
    assert all(len(each.top) == 2 for each in choice.logprobs)
    whole = [*llm.tokenizer.encode(PROMPT), *choice.token_ids]
    [scored] = llm.generate([whole], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None
    own = [each.logprob for each in scored.prompt_logprobs[-len(choice.token_ids) :] if each is not None]
    assert [each.logprob for each in choice.logprobs] == pytest.approx(own, abs=0.05)


def test_max_tokens_inside_a_structure_is_length(llm: LLM) -> None:
    for jump_forward in (False, True):
        asked = params(StructuredOutput.from_schema(PERSON, jump_forward=jump_forward), max_tokens=7)
        [completion] = llm.generate(PROMPT, asked)
        assert completion.choices[0].finish_reason == "length"
        assert len(completion.choices[0].token_ids) == 7


@pytest.mark.parametrize("jump_forward", [False, True])
def test_a_stop_string_ends_a_structure_before_it_is_complete(llm: LLM, jump_forward: bool) -> None:
    asked = params(StructuredOutput.from_schema(PERSON, jump_forward=jump_forward), stop=('"age"',))
    [completion] = llm.generate(PROMPT, asked)
    [choice] = completion.choices
    assert (choice.finish_reason, choice.stopped_by) == ("stop", '"age"')
    assert '"age"' not in choice.text
    assert choice.text.lstrip().startswith("{")


@pytest.mark.full
def test_regexes_choices_and_grammars(llm: LLM) -> None:
    kinds = {
        r"[a-c]{3}-\d{2}": StructuredOutput(regex=r"[a-c]{3}-\d{2}"),
        "yes|no|perhaps": StructuredOutput(choice=("yes", "no", "perhaps"), jump_forward=True),
        r"(ab)+!": StructuredOutput(grammar='root ::= "ab" root | "ab!"'),
        r"[\s\S]*": StructuredOutput(json_object=True),
    }
    completions = llm.generate([PROMPT] * len(kinds), [params(each, max_tokens=60) for each in kinds.values()])
    for pattern, completion in zip(kinds, completions, strict=True):
        [choice] = completion.choices
        assert choice.finish_reason == "stop" or pattern != "yes|no|perhaps"
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.text)


def test_an_answer_in_a_chat_has_the_form_that_was_asked_for(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 30}}, "required": ["capital"]}
    asked = params(StructuredOutput.from_schema({**schema, "additionalProperties": False}), temperature=0.0)
    completion = llm.chat([{"role": "user", "content": "The capital of France, as JSON."}], asked)
    assert completion.choices[0].finish_reason == "stop"
    assert json.loads(completion.choices[0].text).keys() == {"capital"}


@pytest.mark.full
def test_a_little_cache_preempts_structures_and_gives_the_same(llm: LLM) -> None:
    small = LLM(config=EngineConfig(kv_memory=15 << 19, max_seq_len=160, threads=1))
    requests = [
        params(StructuredOutput.from_schema(PERSON, jump_forward=n % 2 == 0), seed=n, max_tokens=120) for n in range(4)
    ]
    expected = llm.generate([PROMPT] * 4, requests)
    given = small.generate([PROMPT] * 4, requests)
    assert small.core.scheduler.counters.preemptions > 0
    assert [each.choices[0].text for each in given] == [each.choices[0].text for each in expected]
    small.frontend.close()


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_contradicts_a_structure_is_refused_by_name(settings: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        params(StructuredOutput(json_object=True), **settings)
    assert refusal.value.param == param


def test_a_schema_that_cannot_be_enforced_is_refused_before_anything_is_generated(llm: LLM) -> None:
    steps = llm.core.scheduler.counters.steps
    with pytest.raises(BadRequest, match="not"):
        llm.generate(["a", "b"], params(StructuredOutput.from_schema({"not": {"type": "string"}})))
    assert llm.core.scheduler.counters.steps == steps


@pytest.mark.full
@pytest.mark.parametrize("template", [pytest.param(OPEN, marks=pytest.mark.full), QWEN], ids=["open", "by variable"])
def test_a_structured_answer_to_a_conversation_is_not_written_into_the_reasoning(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
    config = EngineConfig(kv_memory=32 << 20, threads=1, chat_template=str(tmp_path / "chat.jinja"))
    llm = LLM(config=config)
    messages = [{"role": "user", "content": "Is water wet?"}]
    with closing(llm.frontend):
        completion, free = llm.chat(messages, params(StructuredOutput(choice=("yes", "no")))), llm.chat_prompt(messages)
    assert completion.text in ("yes", "no")
    assert llm.tokenizer.decode(list(completion.prompt_ids), skip_special=False).endswith("<think>\n\n</think>\n\n")
    assert not llm.tokenizer.decode(free, skip_special=False).endswith("</think>\n\n")
