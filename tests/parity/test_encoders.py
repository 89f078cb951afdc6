"""Every family of encoders against transformers: tiny random models, in float32, texts of different lengths at once."""

import pytest
import torch
from encoder_directory import CASES, reference
from encoder_runs import our_model, run, texts

from ostro.backends.torch.encoder import EncoderRunner
from ostro.weights import Pooling


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CASES)
def test_vectors_equal_those_of_transformers_in_either_spelling_of_the_config(name: str) -> None:
    model = reference(CASES[name])
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in texts()])
    assert expected.std() > 0.2, "the test would not see a difference"
    for values in (CASES[name], model.config.to_dict()):
        runner = EncoderRunner(our_model(values, model), Pooling("mean", normalize=False))
        torch.testing.assert_close(run(runner, texts()), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_pairs_equal_those_of_transformers(name: str) -> None:
    model = reference(CASES[name], labels=3)
    knows_types = CASES[name]["model_type"] == "bert"
    pairs = [ids for ids in texts() if len(ids) > 4]
    expected = []
    for ids in pairs:
        types = {"token_type_ids": torch.tensor([[0] * 4 + [1] * (len(ids) - 4)])} if knows_types else {}
        with torch.inference_mode():
            expected.append(model(torch.tensor([ids]), **types).logits[0])
    found = run(EncoderRunner(our_model({**CASES[name], "num_labels": 3}, model)), pairs, second=4)
    torch.testing.assert_close(found, torch.stack(expected), atol=2e-5, rtol=0)


@pytest.mark.parametrize("budget", [1, 20, 1000])
def test_texts_are_computed_whole_whatever_the_budget(budget: int) -> None:
    model = reference(CASES["modernbert"])
    runner = EncoderRunner(our_model(CASES["modernbert"], model), Pooling("cls", normalize=False))
    alone = torch.cat([run(runner, [ids]) for ids in texts()])
    torch.testing.assert_close(run(runner, texts(), budget=budget), alone, atol=1e-5, rtol=0)


def test_a_long_text_does_not_look_stuck() -> None:
    """It is computed in one step, and an engine that reports nothing for a minute is ended."""
    model = reference(CASES["bert"])
    runner = EncoderRunner(our_model(CASES["bert"], model), Pooling("cls", normalize=False))
    run(runner, texts()[:1])
    assert runner.strides == model.config.num_hidden_layers


@pytest.mark.parametrize("mode", ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"])
def test_every_way_of_pooling_is_that_of_sentence_transformers(mode: str) -> None:
    model = reference(CASES["bert"])
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in texts()]
    expected = torch.stack([_pooled(mode, each) for each in states])
    runner = EncoderRunner(our_model(CASES["bert"], model), Pooling(mode, normalize=False))  # type: ignore[arg-type]
    torch.testing.assert_close(run(runner, texts()), expected, atol=2e-5, rtol=0)


def _pooled(mode: str, states: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, len(states) + 1)
    ways: dict[str, torch.Tensor] = {
        "cls": states[0],
        "lasttoken": states[-1],
        "max": states.amax(0),
        "mean": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
        "weightedmean": (states * weights[:, None]).sum(0) / weights.sum(),
    }
    return ways[mode]
