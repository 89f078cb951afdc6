"""The default model, its real weights and tokenizer, against transformers."""

import copy
from collections.abc import Iterator

import pytest
import torch
from dense_context import dense_logits
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ostro import LLM, SamplingParams
from ostro.config import EngineConfig
from ostro.weights import open_checkpoint

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "In 1969, humans first",
    "Q: What is 17 + 25?\nA:",
    "The three primary colours are",
    "Dear Sir or Madam,\n\n",
    "Water boils at",
    "import numpy as np\n\n",
    "¿Cómo se dice 'good morning' en español?",
    "Photosynthesis is the process by which",
    "The quick brown fox",
    "SELECT name, age FROM",
    "To be, or not to be",
    "A recipe for pancakes:\n1.",
    "The mitochondria is",
    "Das Wetter ist heute",
    "My favourite book is",
    "<html>\n<head>\n",
    "3.14159265",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """In float32 throughout, as transformers is."""
    return LLM(config=EngineConfig(backend="torch"))


@pytest.fixture(scope="module")
def peer() -> Iterator[LlamaForCausalLM]:
    checkpoint = open_checkpoint(None)
    # Not filled with random numbers first, which takes 5 s.
    model = LlamaForCausalLM.from_pretrained(
        None,
        config=LlamaConfig(**dict(checkpoint.config)),
        state_dict=dict(checkpoint.tensors()),
        dtype=torch.float32,
    )
    with torch.inference_mode():
        yield model.eval()


@pytest.fixture(scope="module")
def peer_logits(llm: LLM, peer: LlamaForCausalLM) -> list[Tensor]:
    """Logits of each prompt: [tokens, vocabulary]."""
    return [peer(torch.tensor([llm.tokenizer.encode(prompt)])).logits[0] for prompt in PROMPTS]


@pytest.mark.full
def test_greedy_tokens_are_those_of_transformers(llm: LLM, peer: LlamaForCausalLM) -> None:
    """Each token is the one that transformers ranks first after the same tokens, so greedy decoding gives the same."""
    # Enough tokens that texts go on to a second page.
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
    completions = llm.generate(PROMPTS[::2], params)
    for completion in completions:
        [choice] = completion.choices
        assert len(choice.token_ids) == 14
        ids = [*completion.prompt_ids, *choice.token_ids]
        logits = peer(torch.tensor([ids])).logits[0]
        assert logits[len(completion.prompt_ids) - 1 : -1].argmax(-1).tolist() == choice.token_ids


@pytest.mark.full
def test_logits_are_those_of_transformers(llm: LLM, peer: LlamaForCausalLM, peer_logits: list[Tensor]) -> None:
    """About as near to float64 as transformers' own float32. How near that is depends on the order of each sum, so on
    the processor and on how the runner laid out its weights; an error in the model's arithmetic is far larger.
    """
    model = llm.core.runner.model  # type: ignore[attr-defined]
    exact_peer = copy.deepcopy(peer).double()
    ours, theirs = [], []
    for prompt, logits in list(zip(PROMPTS, peer_logits, strict=True))[::4]:
        ids = llm.tokenizer.encode(prompt)
        exact = exact_peer(torch.tensor([ids])).logits[0]
        ours.append((dense_logits(model, ids) - exact).flatten())
        theirs.append((logits - exact).flatten())
    assert torch.cat(ours).square().mean().sqrt() < 4 * torch.cat(theirs).square().mean().sqrt()
    assert torch.cat(ours).abs().max() < 5e-4


@pytest.mark.full
def test_scores_are_those_of_transformers(llm: LLM, peer: LlamaForCausalLM) -> None:
    continuations = [" Paris", " a city of lights", " 42"]
    scores = llm.score(["The capital of France is"] * 3, continuations)
    context = llm.tokenizer.encode("The capital of France is")
    for continuation, score in zip(continuations, scores, strict=True):
        ids = llm.tokenizer.encode("The capital of France is" + continuation)
        logprobs = peer(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [logprobs[at - 1, ids[at]].item() for at in range(len(context), len(ids))]
        assert score.logprob == pytest.approx(sum(expected), abs=1e-3)
        assert score.num_tokens == len(expected)
    assert [score.is_greedy for score in scores] == [True, False, False]


@pytest.mark.full
def test_seeded_draws_are_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    """Rows of different batches differ in their last bits; a draw that inverted a running sum flipped on those."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=11, ignore_eos=True)
    together = llm.generate(PROMPTS[:4], params)
    for prompt, completion in zip(PROMPTS, together, strict=False):
        assert llm.generate(prompt, params)[0].choices[0].token_ids == completion.choices[0].token_ids


def test_native_scores_are_close_to_those_of_transformers(peer_logits: list[Tensor]) -> None:
    """At the file's own precision, activations in 8 bits: a score moves by little, and all of them by less."""
    llm = LLM()
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    off = []
    for completion, logits in zip(llm.generate(PROMPTS, params), peer_logits, strict=True):
        logprobs = logits.log_softmax(-1)
        given = completion.prompt_logprobs
        assert given is not None
        off += [
            each.logprob - logprobs[position, each.token_id].item()
            for position, each in enumerate(each for each in given if each is not None)
        ]
    errors = torch.tensor(off)
    assert errors.abs().mean() < 0.12
    assert errors.mean().abs() < 0.03
