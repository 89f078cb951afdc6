"""What a model's files recommend where requests are silent: read with care, and never before a request's own word."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_directory import write_model

from ostro import LLM, EngineConfig, SamplingParams
from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import NEUTRAL

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def read(**config: object) -> SamplingDefaults:
    return SamplingDefaults.read(config, source="some model")


def write_generation_config(directory: Path, **config: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory


# --- reading --------------------------------------------------------------------------------------------------------


def test_each_sampling_field_of_a_file_is_a_default() -> None:
    found = read(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, max_new_tokens=512)
    assert found == SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=512
    )


def test_fields_absent_from_a_file_set_nothing() -> None:
    assert read(temperature=None, eos_token_id=2, transformers_version="4.0").given == {}
    assert read(top_k=5).given == {"top_k": 5}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.5),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", [0.1]),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("max_new_tokens", "x" * 10_000),
    ],
)
def test_nonsense_is_skipped_with_one_line_in_the_log(
    field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(**{"top_p": 0.5, field: value}).given == ({} if field == "top_p" else {"top_p": 0.5})
    [record] = caplog.records
    assert record.message.startswith(f"some model: {field} = ")
    assert len(record.message) < 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from([*NEUTRAL, "max_new_tokens", "do_sample"]), json_values))
def test_no_file_is_worth_a_crash(config: dict[str, object]) -> None:
    read(**config).fill(SamplingParams(max_tokens=None))


def test_do_sample_false_is_greedy_whatever_else_a_file_says_about_sampling() -> None:
    found = read(do_sample=False, temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2)
    assert found.given == {"temperature": 0.0, "repetition_penalty": 1.2}


def test_a_temperature_counts_whether_or_not_do_sample_stands_beside_it() -> None:
    assert read(do_sample=True, temperature=0.7) == read(temperature=0.7) == SamplingDefaults(temperature=0.7)


# --- filling --------------------------------------------------------------------------------------------------------


DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=512)


@pytest.mark.parametrize("field", NEUTRAL)
def test_a_request_that_names_a_field_keeps_its_value_even_if_it_is_the_neutral_one(field: str) -> None:
    filled = DEFAULTS.fill(SamplingParams(**{field: NEUTRAL[field]}))  # type: ignore[arg-type]
    assert getattr(filled, field) == NEUTRAL[field]
    others = NEUTRAL.keys() - {field}
    assert {name: getattr(filled, name) for name in others} == {name: DEFAULTS.given[name] for name in others}


def test_neutral_values_apply_where_the_model_sets_none() -> None:
    params = SamplingDefaults().fill(SamplingParams())
    assert {name: getattr(params, name) for name in NEUTRAL} == NEUTRAL


def test_a_changed_copy_still_knows_what_was_left_out() -> None:
    changed = SamplingParams(top_p=0.5).with_changes(temperature=0.0, seed=7)
    filled = DEFAULTS.fill(changed)
    assert (filled.temperature, filled.top_p, filled.top_k, filled.seed) == (0.0, 0.5, 20, 7)
    assert filled.unset == frozenset()


def test_a_default_number_of_tokens_is_for_requests_without_any_limit() -> None:
    assert DEFAULTS.fill(SamplingParams(max_tokens=None)).default_max_tokens == 512
    assert DEFAULTS.fill(SamplingParams(max_tokens=None, default_max_tokens=128)).default_max_tokens == 128
    assert DEFAULTS.fill(SamplingParams(max_tokens=9)).default_max_tokens is None


def test_the_upper_of_two_sets_of_defaults_counts_first() -> None:
    upper = SamplingDefaults(temperature=0.0, max_tokens=7)
    assert upper.over(DEFAULTS).given == DEFAULTS.given | {"temperature": 0.0, "max_tokens": 7}


# --- offline --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its file asks for greedy decoding, which can be told from draws at temperature 1."""
    return write_generation_config(write_model(tmp_path_factory.mktemp("model")), do_sample=False)


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(directory, EngineConfig(threads=1))


def test_offline_calls_take_the_models_defaults_where_they_are_silent(llm: LLM) -> None:
    silent = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = llm.generate("the fox", GREEDY)[0].text
    assert llm.generate("the fox", silent)[0].text == expected
    assert "".join(delta.text for delta in llm.stream("the fox", silent)) == expected
    asked = [{"role": "user", "content": "the fox"}]
    assert llm.chat(asked, silent).text == llm.chat(asked, GREEDY).text
    assert llm.sampling_defaults == SamplingDefaults(temperature=0.0)


def test_offline_calls_that_name_a_value_have_it(llm: LLM) -> None:
    drawn = {llm.generate("the fox", GREEDY.with_changes(temperature=1.0, seed=n))[0].text for n in range(3)}
    assert len(drawn) == 3


def test_offline_engines_can_ignore_the_file(directory: Path, llm: LLM) -> None:
    plain = LLM(directory, EngineConfig(generation_config="ignore", threads=1))
    assert plain.sampling_defaults == SamplingDefaults()
    silent = SamplingParams(max_tokens=24, ignore_eos=True, seed=5)
    named = silent.with_changes(**NEUTRAL)
    assert plain.generate("the fox", silent)[0].text == plain.generate("the fox", named)[0].text
    assert plain.generate("the fox", silent)[0].text != llm.generate("the fox", silent)[0].text


def test_every_end_of_sequence_id_of_the_file_ends_a_text_whatever_the_tokenizer(tmp_path: Path) -> None:
    """With another model's tokenizer only that one's ids counted."""
    model, other = write_model(tmp_path / "model"), write_model(tmp_path / "other")
    first, second = LLM(model, EngineConfig(threads=1)).generate("the fox", GREEDY)[0].choices[0].token_ids[3:5]
    write_generation_config(model, eos_token_id=[first, second])
    llm = LLM(model, EngineConfig(tokenizer=str(other), threads=1))
    assert {first, second} < llm.tokenizer.eos_ids
    [choice] = llm.generate("the fox", GREEDY.with_changes(ignore_eos=False))[0].choices
    assert choice.finish_reason == "stop"
    assert choice.token_ids[-1] in {first, second}
