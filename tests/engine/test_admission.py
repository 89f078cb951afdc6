"""The checks that a request passes before it is queued, on either side of the process boundary."""

from dataclasses import replace

import pytest

from ostro.engine.admission import AdmissionRules
from ostro.engine.constraint import Constraint
from ostro.engine.request import Request
from ostro.errors import BadRequest, ContextLengthExceeded, Unsupported
from ostro.sampling_params import SamplingParams
from ostro.structured import StructuredOutput

ADMISSION = AdmissionRules(max_len=8, vocab_size=10)


def request(
    prompt_ids: tuple[int, ...] = (1, 2), params: SamplingParams | None = None, priority: int = 0, turn: int = 0
) -> Request:
    params = params or SamplingParams(max_tokens=1)
    return Request(id=1, prompt_ids=prompt_ids, params=params, seed=0, priority=priority, turn=turn)


@pytest.mark.parametrize("param", ["prompt", "messages", "input"])
def test_error_about_the_prompt_names_it_as_its_caller_does(param: str) -> None:
    for bad in (request((1,) * 8), request(()), request((1, 99))):
        with pytest.raises(BadRequest) as refusal:
            ADMISSION.check(bad, prompt=param)
        assert refusal.value.param == param


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request((1, -1)), "prompt"),
        (request(params=SamplingParams(max_tokens=1, logit_bias={10: 1.0})), "logit_bias"),
        (request(params=SamplingParams(max_tokens=1, stop_token_ids=(10,))), "stop_token_ids"),
        (request(params=SamplingParams(max_tokens=None, min_tokens=2**70)), "min_tokens"),
        (request(params=SamplingParams(max_tokens=1, top_k=2**70)), "top_k"),
        (request(priority=-(2**70)), "priority"),
        (request(turn=2**70), "turn"),
    ],
)
def test_request_that_could_never_run_is_refused_by_the_name_of_its_field(bad: Request, param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        ADMISSION.check(bad)
    assert refusal.value.param == param


def test_prompt_and_output_may_fill_the_context_and_not_exceed_it() -> None:
    assert ADMISSION.longest(request(params=SamplingParams(max_tokens=6))) == 8
    assert ADMISSION.longest(request(params=SamplingParams(max_tokens=None))) == 8
    with pytest.raises(ContextLengthExceeded):
        ADMISSION.check(request(params=SamplingParams(max_tokens=7)))
    with pytest.raises(ContextLengthExceeded):
        ADMISSION.check(request((1,) * 8, SamplingParams(max_tokens=None)))


def test_a_default_number_of_tokens_is_bounded_by_the_context_and_by_min_tokens() -> None:
    def longest(default: int, min_tokens: int = 0) -> int:
        params = SamplingParams(max_tokens=None, default_max_tokens=default, min_tokens=min_tokens)
        return ADMISSION.longest(request(params=params))

    assert longest(4) == 6
    assert longest(1024) == 8
    assert longest(2, min_tokens=5) == 7


def test_a_runner_that_does_not_constrain_refuses_a_constraint_by_name() -> None:
    constrained = replace(request(), constraint=Constraint(grammar='start: "a"'))
    with pytest.raises(Unsupported) as refusal:
        ADMISSION.check(constrained)
    assert refusal.value.param == "structured"
    replace(ADMISSION, constrains=True).check(constrained)


def test_a_structured_output_that_nobody_has_compiled_is_refused_rather_than_ignored() -> None:
    asked = request(params=SamplingParams(max_tokens=1, structured=StructuredOutput(json_object=True)))
    with pytest.raises(Unsupported) as refusal:
        replace(ADMISSION, constrains=True).check(asked)
    assert refusal.value.param == "structured"
