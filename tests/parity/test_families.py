"""Every model family against transformers: tiny random models, in float32, sequences longer than their windows."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from dense_context import DenseContext, dense_logits
from every_family import CASES, RECURRENT, configs_of, family_of_case, native_configs, some, with_variants_in_full
from family_case import Config
from native_models import native, needs_library, packed
from telling_weights import telling
from transformers.core_model_loading import revert_weight_conversion

from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits
from ostro.models.architecture import Architecture, HrmText
from ostro.models.registry import FAMILIES, describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights
from ostro.torch_models.rope import Rotary

TOLERANCE = 5e-5
SHORT, LONG = 40, 100
"""Prompt lengths: within and beyond the original context of the longrope models below."""

SIZES: Config = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
SPECIAL: Config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {name: {**values, **SPECIAL} for name, values in configs_of(tuple(CASES), SIZES).items()}


@dataclass(frozen=True)
class Reference:
    """A model of transformers."""

    model: transformers.PreTrainedModel
    tensors: Mapping[str, torch.Tensor]
    """Under the names, and in the form, that checkpoints have."""

    def logits(self, ids: list[int]) -> torch.Tensor:
        return logits_of(self.model, ids)


@cache
def reference_of(name: str, *, headless: bool = False) -> Reference:
    # A copy: transformers fills in the tables within.
    settings = deepcopy(dict(CONFIGS[name]))
    own = CASES[name.split("-")[0]].reference
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings, **own)
    auto = transformers.AutoModel if headless else transformers.AutoModelForCausalLM
    # Eager, because the others know no soft-cap.
    model = telling(auto.from_config(config, attn_implementation="eager"))
    return Reference(model, revert_weight_conversion(model, model.state_dict()))


def logits_of(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def our_model(values: Config, reference: Reference, *, max_seq_len: int | None = None) -> Model:
    model = build_model(values, max_seq_len=max_seq_len, dtype=torch.float32)
    load_weights(model, reference.tensors.items())
    return model


def tolerance(name: str, expected: torch.Tensor) -> float:
    """More for recurrent layers, which transformers computes in blocks: its own single steps are as far away. Tests of
    those alone are stricter.
    """
    is_recurrent = name.split("-")[0] in RECURRENT
    return 2 * TOLERANCE * expected.abs().max().item() if is_recurrent else TOLERANCE


def random_ids(length: int) -> list[int]:
    ids: list[int] = torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    return ids


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers_in_either_spelling_of_the_config(name: str) -> None:
    reference = reference_of(name)
    ids = random_ids(SHORT)
    expected = reference.logits(ids)
    assert expected.std() > 0.3, "the test would not see a difference"
    for values in (CONFIGS[name], reference.model.config.to_dict()):
        ours = dense_logits(our_model(values, reference), ids)
        torch.testing.assert_close(ours, expected, atol=tolerance(name, expected), rtol=0)


@needs_library
@pytest.mark.parametrize("name", with_variants_in_full(native_configs(SIZES)))
def test_native_scores_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of every token of a prompt that is run in pieces; and what follows is the token that transformers ranks first."""
    reference = reference_of(name)
    ids = random_ids(SHORT)
    expected = reference.logits(ids).log_softmax(-1)
    assert expected.std() > 0.3, "the test would not see a difference"
    weights = packed(CONFIGS[name], our_model(CONFIGS[name], reference), tmp_path / "packed")
    core = EngineCore(native(weights), Limits(max_batch_tokens=7, max_batch_seqs=1))
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    core.add(Request(id=0, prompt_ids=tuple(ids), params=params, seed=0, prompt_logprobs_from=1))
    tokens, scored = [], []
    while core.has_work:
        for gain in core.step():
            tokens += gain.token_ids
            scored += gain.prompt_logprobs
    assert tokens == [expected[-1].argmax().item()]
    assert [each.token_id for each in scored] == ids[1:]
    theirs = expected[torch.arange(SHORT - 1), ids[1:]]
    torch.testing.assert_close(torch.tensor([each.logprob for each in scored]), theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_fed_in_chunks_gives_the_logits_of_the_whole(name: str) -> None:
    model = our_model(CONFIGS[name], reference_of(name))
    ids = random_ids(SHORT)
    whole = dense_logits(model, ids)
    torch.testing.assert_close(dense_logits(model, ids, chunk=7), whole, atol=tolerance(name, whole), rtol=0)


def test_longrope_takes_its_long_factors_when_a_longer_context_is_asked_for() -> None:
    reference = reference_of("phi3")
    model = our_model(CONFIGS["phi3"], reference, max_seq_len=128)
    ids = random_ids(LONG)
    torch.testing.assert_close(dense_logits(model, ids), reference.logits(ids), atol=TOLERANCE, rtol=0)


def test_ministral_3_scales_queries_when_a_longer_context_is_asked_for() -> None:
    reference = reference_of("ministral3")
    ids = random_ids(LONG)
    expected = reference.logits(ids)
    model = our_model(CONFIGS["ministral3"], reference, max_seq_len=LONG)
    torch.testing.assert_close(dense_logits(model, ids), expected, atol=TOLERANCE, rtol=0)
    unscaled = dense_logits(our_model(CONFIGS["ministral3"], reference), ids)
    assert (unscaled[:60] - expected[:60]).abs().max() < TOLERANCE < (unscaled[60:] - expected[60:]).abs().max()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's notice of a CPU without bfloat16 instructions
@pytest.mark.parametrize("name", some(CASES, "llama", "gemma3", "gemma4", "gpt2", "hrm_text", "llama4"))
def test_bfloat16_strays_from_float32_no_further_than_transformers_does(name: str) -> None:
    reference = reference_of(name)
    ids = random_ids(SHORT)
    exact = reference.logits(ids)
    rounded = logits_of(deepcopy(reference.model).to(torch.bfloat16), ids).float()
    model = build_model(CONFIGS[name], dtype=torch.bfloat16)
    load_weights(model, reference.tensors.items())
    # The median, because an expert that is only just chosen or not makes a few logits differ by far more.
    assert (dense_logits(model, ids) - exact).abs().median() < 1.2 * (rounded - exact).abs().median()


@pytest.mark.parametrize("name", [name for name in CONFIGS if CASES[name.split("-")[0]].ropes == 1])
def test_rope_frequencies_are_within_a_last_bit_of_those_of_transformers(name: str) -> None:
    """Theirs are float32 powers, which differ between libraries; ours are rounded once. More than a last bit would be a
    visible angle at position 100,000.
    """
    described = describe(CONFIGS[name])
    assert isinstance(described, Architecture | HrmText)
    rope = described.rope if isinstance(described, HrmText) else described.ropes[0]
    rotary = Rotary(rope, head_dim=described.shape.head_dim, max_seq_len=described.shape.max_seq_len)
    modules = reference_of(name).model.named_modules()
    rotation = next(module for path, module in modules if path.endswith(("rotary_emb", "pos_emb")))
    # A long prompt of an earlier test leaves the stretched ones in place.
    expected = getattr(rotation, "original_inv_freq", rotation.inv_freq)
    torch.testing.assert_close(rotary.frequencies, torch.cat((-expected, expected)), rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("gemma4")])
def test_both_ropes_of_gemma_4_are_within_a_last_bit_of_those_of_transformers(name: str) -> None:
    described, reference = describe(CONFIGS[name]), reference_of(name)
    assert isinstance(described, Architecture)
    for index, kind in enumerate(("full_attention", "sliding_attention")):
        rope = Rotary(described.ropes[index], head_dim=described.rope_head_dim(index), max_seq_len=64)
        expected = getattr(reference.model.model.rotary_emb, f"{kind}_inv_freq")
        torch.testing.assert_close(rope.frequencies, torch.cat((-expected, expected)), rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_the_bare_backbone_gives_the_hidden_states_of_transformers(name: str) -> None:
    reference, bare = reference_of(name, headless=True), family_of_case(name).bare
    assert type(reference.model).__name__ == bare
    model = our_model({**CONFIGS[name], "architectures": [bare]}, reference)
    ids = random_ids(SHORT)
    with torch.inference_mode():
        expected = reference.model(torch.tensor([ids])).last_hidden_state[0]
        ours = model(torch.tensor(ids), torch.arange(SHORT), DenseContext())
    torch.testing.assert_close(ours, expected, atol=tolerance(name, expected), rtol=0)


def test_architecture_names_are_those_that_transformers_writes() -> None:
    for family in FAMILIES:
        config = transformers.CONFIG_MAPPING[family.model_type]
        assert transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config].__name__ == family.architecture
        assert transformers.MODEL_MAPPING[config].__name__ == family.bare
