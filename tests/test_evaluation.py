"""What the harness asks of an LLM in process: requests built by hand, on a model whose context is short."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from model_directory import write_model

from ostro import LLM, SamplingParams
from ostro.config import EngineConfig
from ostro.frontend.requests import Prompt
from ostro.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from ostro.evaluation import Evaluated

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra `eval`")

LONGEST = 64
LONG = "the quick brown fox jumps over the lazy dog and the dog does not mind " * 8


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = write_model(tmp_path_factory.mktemp("evaluated") / "tiny")
    return LLM(directory, EngineConfig(max_seq_len=LONGEST, threads=1))


@pytest.fixture(scope="module")
def evaluated(llm: LLM) -> "Evaluated":
    from ostro.evaluation import Evaluated

    return Evaluated(llm)


def likelihoods(evaluated: "Evaluated", *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    return evaluated.loglikelihood(_instances("loglikelihood", *pairs))


def texts(evaluated: "Evaluated", *asked: tuple[str, Mapping[str, object]]) -> list[str]:
    return evaluated.generate_until(_instances("generate_until", *asked))


def of_pair(llm: LLM, context: Prompt, continuation: Prompt) -> tuple[object, bool]:
    [score] = llm.score([context], [continuation])
    return pytest.approx(score.logprob, abs=1e-4), score.is_greedy


def test_a_pair_that_fits_is_scored_as_the_engine_scores_it(evaluated: "Evaluated", llm: LLM) -> None:
    pairs = [("the quick", " brown fox"), ("the dog does ", "not"), ("caf\u00e9 \u4f60", "\u597d")]
    assert likelihoods(evaluated, *pairs) == [of_pair(llm, *pair) for pair in pairs]


def test_a_context_that_is_too_long_loses_its_beginning(evaluated: "Evaluated", llm: LLM) -> None:
    """It ended the whole evaluation."""
    context = LONG.rstrip()
    border, ids = len(llm.tokenizer.encode(context)), llm.tokenizer.encode(context + " yes, no")
    assert border > LONGEST
    num_rest = len(ids) - border
    [measured, beside] = likelihoods(evaluated, (context, " yes, no"), ("the dog", " does"))
    assert measured == of_pair(llm, ids[-LONGEST:-num_rest], ids[-num_rest:])
    assert [beside] == likelihoods(evaluated, ("the dog", " does"))


def test_a_pair_as_long_as_the_context_is_left_whole(evaluated: "Evaluated", llm: LLM) -> None:
    lengths = {len(llm.tokenizer.encode(LONG[:count] + "!")): count for count in range(1, len(LONG))}
    context = LONG[: lengths[LONGEST]]
    assert likelihoods(evaluated, (context, "!")) == [of_pair(llm, context, "!")]


def test_too_long_continuation_is_scored_on_its_last_tokens(evaluated: "Evaluated", llm: LLM) -> None:
    ids = llm.tokenizer.encode("yes" + LONG)[-LONGEST:]
    assert likelihoods(evaluated, ("yes", LONG)) == [of_pair(llm, ids[:1], ids[1:])]


@pytest.mark.parametrize("context", ["", " ", " \n\t"])
def test_after_an_empty_context_a_continuation_follows_the_end_token(
    evaluated: "Evaluated", llm: LLM, context: str
) -> None:
    """One of only white space ended the whole evaluation."""
    [end] = llm.tokenizer.eos_ids
    expected = of_pair(llm, [end], llm.tokenizer.encode(context + "the dog"))
    assert likelihoods(evaluated, (context, "the dog")) == [expected]


@pytest.mark.parametrize("num_wanted", [LONGEST - 1, LONGEST, LONGEST + 1, 256])
def test_an_output_as_long_as_the_context_leaves_half_of_it_to_the_prompt(
    evaluated: "Evaluated", llm: LLM, num_wanted: int
) -> None:
    """It left the prompt empty, or kept its beginning."""
    half = LONGEST // 2
    [expected] = llm.generate([llm.tokenizer.encode(LONG)[-half:]], _greedily(half))
    assert texts(evaluated, (LONG, {"until": [], "max_gen_toks": num_wanted})) == [expected.text]


def test_without_a_length_a_short_prompt_leaves_the_rest_of_the_context(evaluated: "Evaluated", llm: LLM) -> None:
    [expected] = llm.generate(["the dog"], _greedily(LONGEST - len(llm.tokenizer.encode("the dog"))))
    assert texts(evaluated, ("the dog", {"until": None})) == [expected.text]


def test_a_prompt_gives_way_to_an_output_of_less_than_half(evaluated: "Evaluated", llm: LLM) -> None:
    [expected] = llm.generate([llm.tokenizer.encode(LONG)[-(LONGEST - 5) :]], _greedily(5))
    assert texts(evaluated, (LONG, {"until": ["\n\n"], "max_gen_toks": 5})) == [expected.text]


def test_an_empty_prompt_is_the_end_token(evaluated: "Evaluated", llm: LLM) -> None:
    [expected] = llm.generate([list(llm.tokenizer.eos_ids)], _greedily(5))
    assert texts(evaluated, ("", {"until": "\n\n", "max_gen_toks": 5})) == [expected.text]


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 0.0),
        ({"temperature": 0.0}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "do_sample": True}, 0.7),
        ({"temperature": 0.7, "do_sample": False}, 0.0),
    ],
)
def test_a_temperature_means_what_it_means_to_the_harness_s_own_models(
    asked: dict[str, object], temperature: float
) -> None:
    from ostro.evaluation import _params

    assert _params(asked).temperature == temperature


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens"])
def test_a_length_has_the_names_that_the_harness_knows(name: str) -> None:
    from ostro.evaluation import _params

    assert _params({name: 7}).max_tokens == 7


def _greedily(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def _instances(kind: Any, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_a_task_does_not_take_the_models_own_sampling_defaults() -> None:
    from ostro.evaluation import _params

    recommended = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
    asked = _params({"until": ["\n"]})
    assert recommended.fill(asked) == asked
    assert asked.greedy
