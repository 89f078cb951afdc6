"""Adapters against PEFT itself, against a model merged by hand, and what of an adapter is refused."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from dense_context import dense_logits
from every_family import CASES, config_of, some
from peft_directory import ALL, peft_config, random_adapter, write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA, VOCAB, random_model

from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from ostro.torch_models.base import Model
from ostro.torch_models.loading import places_of
from ostro.torch_models.lora import AdapterRun, Adapters
from ostro.weights.adapter import read_adapter

QWEN3: Mapping[str, object] = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
# HRM-Text's are tested with transformers' (`parity/test_hrm_text.py`).
CONFIGS = {name: config_of(name, {**LLAMA, "max_position_embeddings": 64}) for name in CASES if name != "hrm_text"}
IDS = torch.randint(0, VOCAB, (23,), generator=torch.Generator().manual_seed(5)).tolist()


def targets_of(name: str) -> tuple[str, ...]:
    """The matrices of a mixture's attention; of others, all."""
    case = CASES[name]
    return case.projections[:4] if case.mixture else case.projections


def adapted_logits(model: Model, directory: Path, ids: list[int] = IDS) -> torch.Tensor:
    adapters = Adapters(model, {"it": read_adapter(directory)})
    adapters.attach(model)
    assert adapters.begin([(adapters.slot("it"), len(ids))])
    return dense_logits(model, ids)


def merge(model: Model, directory: Path) -> None:
    """W + scale · B A, written into the model's own weights."""
    places = places_of(model)
    for name, term in read_adapter(directory).items():
        delta = torch.from_numpy(term.scale * (term.b @ term.a))
        place = places[f"{name}.weight"]
        # GPT-2 stores its matrices the other way round, GPT-NeoX its queries, keys and values head by head.
        stored = delta.T if name.startswith("transformer.h.") else delta
        memory = place.memory
        stored = stored if place.taken is None else place.taken.of(stored)
        memory += stored * place.factors() if place.scales else stored


@pytest.mark.cases(12)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_a_model_merged_by_hand(name: str, tmp_path: Path) -> None:
    model, merged = random_model(CONFIGS[name]), random_model(CONFIGS[name])
    directory = random_adapter(tmp_path / "a", model, targets=targets_of(name))
    base = dense_logits(model, IDS)
    merge(merged, directory)
    expected = dense_logits(merged, IDS)
    assert (expected - base).abs().max() > 0.1
    torch.testing.assert_close(adapted_logits(model, directory), expected, atol=1e-4, rtol=1e-4)


PEFT_CASES: Mapping[str, Mapping[str, object]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": list(ALL)},
    "some": {"r": 3, "lora_alpha": 5, "target_modules": ["k_proj", "up_proj", "o_proj"]},
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": list(ALL), "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(ALL),
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
        "alpha_pattern": {"v_proj": 3, r"layers\.\d\.self_attn\.o_proj": 1},
    },
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": list(ALL), "layers_to_transform": [1]},
    "pattern": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.[qv]_proj"},
}


@pytest.mark.parametrize("case", some(PEFT_CASES, "rslora", "patterns"))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_equal_pefts_merged_model(family: str, case: str, tmp_path: Path) -> None:
    import peft
    import transformers

    settings = {**LLAMA, "tie_word_embeddings": False}
    torch.manual_seed(3)
    if family == "llama":
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    else:
        settings |= {"head_dim": 16, "architectures": ["Qwen3ForCausalLM"]}
        base = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))
    for parameter in base.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 1.0, 0.2)
    model = random_model(settings)
    for name, place in places_of(model).items():
        place.fill(base.get_parameter(name).data)
    plain = dense_logits(model, IDS)
    tuned = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **PEFT_CASES[case]))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.2)
    tuned.save_pretrained(tmp_path / "saved")
    merged = tuned.merge_and_unload().eval()
    with torch.inference_mode():
        expected = merged(torch.tensor([IDS])).logits[0]
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(adapted_logits(model, tmp_path / "saved"), expected, atol=1e-5, rtol=1e-5)


def test_rows_without_an_adapter_get_the_base_alone(tmp_path: Path) -> None:
    model = random_model()
    adapters = Adapters(model, {"it": read_adapter(random_adapter(tmp_path / "a", model))})
    base = dense_logits(model, IDS)
    adapters.attach(model)
    assert not adapters.begin([(adapters.slot(None), len(IDS))])
    assert torch.equal(dense_logits(model, IDS), base)


def test_neighbours_with_equally_many_rows_are_multiplied_together(tmp_path: Path) -> None:
    model = random_model()
    ranks = {"a": 4, "b": 4, "odd": 2, "c": 4, "d": 4}
    found = {name: read_adapter(random_adapter(tmp_path / name, model, rank=rank)) for name, rank in ranks.items()}
    adapters = Adapters(model, found)
    rows = [(None, 3), ("a", 1), ("a", 1), ("b", 2), ("c", 2), ("d", 5), ("odd", 5), ("a", 2), ("c", 2)]
    adapters.begin((adapters.slot(name), count) for name, count in rows)
    assert adapters.runs == [
        AdapterRun(stack=-1, first=0, count=1, rows=3),
        AdapterRun(stack=0, first=0, count=3, rows=6),
        AdapterRun(stack=0, first=3, count=1, rows=5),
        AdapterRun(stack=1, first=0, count=1, rows=5),
        AdapterRun(stack=0, first=0, count=1, rows=2),
        AdapterRun(stack=0, first=2, count=1, rows=2),
    ]


def test_memory_is_that_of_the_matrices_alone_where_nothing_is_fused(tmp_path: Path) -> None:
    """Whatever the ranks: none is filled up to the largest."""
    model = random_model()
    found, stored = {}, 0
    for rank in (1, 2, 7, 64):
        directory = random_adapter(tmp_path / str(rank), model, rank=rank, targets=("o_proj", "down_proj"))
        found[f"rank-{rank}"] = read_adapter(directory)
        stored += sum(tensor.nbytes for tensor in load_file(directory / "adapter_model.safetensors").values())
    assert Adapters(model, found).nbytes == stored


def test_an_adapter_of_the_bare_backbone_finds_its_projections(tmp_path: Path) -> None:
    model = random_model()
    directory = random_adapter(tmp_path / "a", model)
    expected = adapted_logits(random_model(), directory)
    tensors = load_file(directory / "adapter_model.safetensors")
    bare = {name.replace("base_model.model.model.", "base_model.model."): tensor for name, tensor in tensors.items()}
    save_file(bare, directory / "adapter_model.safetensors")
    assert torch.equal(adapted_logits(model, directory), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is set"),
        ({"something_new": {"depth": 2}}, "something_new is set"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changes the base"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ],
)
def test_adapters_beyond_low_rank_terms_are_refused_by_name(
    change: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    directory = random_adapter(tmp_path / "a", random_model())
    (directory / "adapter_config.json").write_text(json.dumps({**peft_config(4), **change}))
    with pytest.raises(UnsupportedModel, match=message):
        read_adapter(directory)


@pytest.mark.parametrize("target", ["model.embed_tokens", "lm_head"])
def test_embeddings_and_head_are_refused_as_targets(target: str, tmp_path: Path) -> None:
    tensors = {f"{target}.lora_A.weight": torch.ones(4, 32), f"{target}.lora_B.weight": torch.ones(VOCAB, 4)}
    with pytest.raises(UnsupportedModel, match="changes embeddings or the head"):
        read_adapter(write_adapter(tmp_path / "a", tensors))


def test_pefts_own_embedding_tensors_are_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", {"model.embed_tokens.lora_embedding_A": torch.ones(4, VOCAB)})
    with pytest.raises(UnsupportedModel, match="changes embeddings or the head"):
        read_adapter(directory)


PROJECTION = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(4, 32), None, "holds only lora_A"),
        (torch.ones(4, 32), torch.ones(32, 5), "do not join at a rank"),
        (torch.ones(9, 32), torch.ones(32, 9), "do not join at a rank"),
        (torch.ones(4, 32, 1), torch.ones(32, 4), "do not join at a rank"),
        (torch.full((4, 32), math.nan), torch.ones(32, 4), "finite"),
        (torch.ones(4, 32, dtype=torch.int8), torch.ones(32, 4), "finite"),
    ],
    ids=["half", "ranks", "unknown rank", "dimensions", "nan", "integers"],
)
def test_damaged_tensors_are_named(a: torch.Tensor, b: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    tensors = {f"{PROJECTION}.lora_A.weight": a} | ({} if b is None else {f"{PROJECTION}.lora_B.weight": b})
    with pytest.raises(BadCheckpoint, match=message):
        read_adapter(write_adapter(tmp_path / "a", tensors))


def test_files_that_are_missing_or_pickled_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no directory"):
        read_adapter(tmp_path / "nowhere")
    directory = random_adapter(tmp_path / "a", random_model())
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(ModelNotFound, match="only as pickle"):
        read_adapter(directory)
    (directory / "adapter_model.bin").unlink()
    with pytest.raises(ModelNotFound, match=r"holds no adapter_model\.safetensors"):
        read_adapter(directory)
    (directory / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(BadCheckpoint, match="damaged"):
        read_adapter(directory)
    (directory / "adapter_config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"adapter_config\.json"):
        read_adapter(directory)


@pytest.mark.parametrize(
    "change", [{"r": 0}, {"r": "8"}, {"lora_alpha": None}, {"alpha_pattern": {"(": 1}}, {"rank_pattern": [1]}]
)
def test_a_config_that_makes_no_sense_is_damaged(change: Mapping[str, object], tmp_path: Path) -> None:
    directory = random_adapter(tmp_path / "a", random_model())
    (directory / "adapter_config.json").write_text(json.dumps({**peft_config(4), **change}))
    with pytest.raises(BadCheckpoint, match=r"adapter_config\.json"):
        read_adapter(directory)


@pytest.mark.parametrize("pattern", [r"(\w+)+\d\d\d", r"(.*)*(.*)*(.*)*z", "(a|a)*" * 50, r"(?:\w|\w\.|[a-z_.])*!"])
def test_a_pattern_that_would_be_matched_for_years_is_matched_at_once(pattern: str, tmp_path: Path) -> None:
    """Python's own engine tries all ways to divide a name, of which there are more than can be counted."""
    directory = random_adapter(tmp_path / "a", random_model())
    (directory / "adapter_config.json").write_text(json.dumps({**peft_config(4), "alpha_pattern": {pattern: 1}}))
    began = time.process_time()
    read_adapter(directory)
    assert time.process_time() - began < 10


@pytest.mark.parametrize("pattern", ["(" * 5000 + "a" + ")" * 5000, "a{99999999999}", "((a{999}){999}){999}", r"(a)\1"])
def test_a_pattern_that_is_too_large_or_needs_backtracking_is_refused(pattern: str, tmp_path: Path) -> None:
    """Some ended the server with an error that nobody expected."""
    directory = random_adapter(tmp_path / "a", random_model())
    (directory / "adapter_config.json").write_text(json.dumps({**peft_config(4), "alpha_pattern": {pattern: 1}}))
    with pytest.raises(BadCheckpoint, match="alpha_pattern"):
        read_adapter(directory)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    deeper, wider = {**LLAMA, "num_hidden_layers": 3}, {**LLAMA, "intermediate_size": 56}
    for name, config in (("deeper", deeper), ("wider", wider)):
        found = read_adapter(random_adapter(tmp_path / name, random_model(config)))
        with pytest.raises(BadCheckpoint, match="may have been made for another model"):
            Adapters(random_model(), {name: found})
