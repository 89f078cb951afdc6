"""What an encoder's files may hold, and what is refused by name."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from encoder_directory import CASES, WIDE, add_modules, reference, write_encoder, write_json
from model_directory import write_pickles
from native_models import needs_library
from safetensors.torch import load_file, save_file

from ostro.backends.loading import load_runner
from ostro.backends.planning import plan
from ostro.config import EngineConfig
from ostro.errors import BadCheckpoint, BadRequest, OstroError, Unsupported, UnsupportedModel
from ostro.llm import LLM
from ostro.models.registry import describe
from ostro.weights import Pooling, open_checkpoint

TEXTS = ["the quick brown fox", "paris", "the lazy dog does not mind a fox"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), reference(CASES["bert"]))


def copy(directory: Path, into: Path) -> Path:
    return shutil.copytree(directory, into, dirs_exist_ok=True)


def with_dense(directory: Path, into: Path) -> Path:
    layer = (torch.zeros(8, 32), torch.zeros(8))
    return add_modules(copy(directory, into), dense=[layer], prompts={"query": "a"})


def expected(model: transformers.PreTrainedModel, llm: LLM) -> torch.Tensor:
    """The mean over all tokens, those at the ends included."""
    with torch.inference_mode():
        states = [model(torch.tensor([llm.tokenizer.encode(text)])).last_hidden_state[0].mean(0) for text in TEXTS]
    return torch.stack(states)


def test_an_encoder_without_modules_embeds_by_the_mean(tmp_path: Path) -> None:
    model = reference(CASES["bert"])
    llm = LLM(write_encoder(tmp_path, model))
    torch.testing.assert_close(torch.tensor(llm.embed(TEXTS)), expected(model, llm), atol=2e-5, rtol=0)


def test_dense_modules_and_length_one_follow_the_pooling(tmp_path: Path) -> None:
    model = reference(CASES["bert"])
    torch.manual_seed(0)
    layers = [(torch.randn(24, 32) / 5, torch.randn(24)), (torch.randn(8, 24) / 5, torch.randn(8))]
    llm = LLM(add_modules(write_encoder(tmp_path, model), dense=layers))
    vectors = expected(model, llm)
    for weight, bias in layers:
        vectors = torch.tanh(vectors @ weight.T + bias)
    vectors = torch.nn.functional.normalize(vectors)
    torch.testing.assert_close(torch.tensor(llm.embed(TEXTS)), vectors, atol=2e-5, rtol=0)


def test_names_of_old_checkpoints_and_heads_for_training_are_known(tmp_path: Path) -> None:
    """BERT's first checkpoints call a norm's weight and bias gamma and beta, and still have their heads."""
    model = reference(CASES["bert"])
    directory = write_encoder(tmp_path, model, {"architectures": ["BertForMaskedLM"]})
    stored = load_file(directory / "model.safetensors")
    renamed = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in stored.items()
    }
    heads = {"cls.predictions.bias": torch.zeros(64), "cls.predictions.transform.dense.weight": torch.zeros(32, 32)}
    save_file({**renamed, **heads}, directory / "model.safetensors")
    llm = LLM(directory)
    torch.testing.assert_close(torch.tensor(llm.embed(TEXTS)), expected(model, llm), atol=2e-5, rtol=0)


def test_pickled_weights_are_read_without_the_numbers_of_positions(tmp_path: Path) -> None:
    model = reference(CASES["xlm_roberta"])
    directory = write_encoder(tmp_path, model)
    stored = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    write_pickles(directory, {**stored, "embeddings.position_ids": torch.arange(40)[None]}, 1)
    llm = LLM(directory)
    torch.testing.assert_close(torch.tensor(llm.embed(TEXTS)), expected(model, llm), atol=2e-5, rtol=0)


def test_the_context_is_that_of_sentence_transformers_unless_another_is_asked_for(tmp_path: Path) -> None:
    directory = add_modules(write_encoder(tmp_path, reference(CASES["bert"])), max_seq_length=9)
    config = open_checkpoint(directory).config
    assert describe(config).shape.max_seq_len == 9
    assert describe(config, max_seq_len=30).shape.max_seq_len == 30
    with pytest.raises(BadRequest, match="40 positions"):
        describe(config, max_seq_len=41)


def test_positions_of_roberta_begin_behind_those_of_padding(tmp_path: Path) -> None:
    assert (
        describe(open_checkpoint(write_encoder(tmp_path, reference(CASES["roberta"]))).config).shape.max_seq_len == 38
    )


@pytest.mark.parametrize(
    ("name", "settings", "field"),
    [
        ("bert", {"hidden_size": 33}, "hidden_size"),
        ("bert", {"num_attention_heads": 0}, "num_attention_heads"),
        ("bert", {"max_position_embeddings": -1}, "max_position_embeddings"),
        ("bert", {"type_vocab_size": 1 << 40}, "type_vocab_size"),
        ("bert", {"layer_norm_eps": float("nan")}, "layer_norm_eps"),
        ("bert", {"hidden_act": "golu"}, "golu"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"architectures": ["BertForSequenceClassification"], "id2label": [1]}, "id2label"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id"),
        ("roberta", {"pad_token_id": 39}, "max_position_embeddings"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert", {"local_attention": 0}, "local_attention"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("modernbert", {"global_rope_theta": 0}, "global_rope_theta"),
        ("modernbert", {"norm_bias": "yes"}, "norm_bias"),
    ],
)
def test_bad_configs_are_refused_with_the_field(name: str, settings: Mapping[str, object], field: str) -> None:
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=field):
        describe({**CASES[name], **settings})


@pytest.mark.parametrize(
    ("file", "value", "complaint"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "sum"}, "pools by sum"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "mean and max"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": 1}, "pooling_mode_cls_token"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
        ("2_Dense/config.json", {"in_features": 31, "out_features": 8}, "in_features"),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 0}, "out_features"),
        (
            "2_Dense/config.json",
            {"in_features": 32, "out_features": 8, "activation_function": "os.system"},
            "activation_function",
        ),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 8, "use_residual": True}, "use_residual"),
        ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "'query'"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
    ],
)
def test_bad_modules_are_refused_with_the_field(
    tmp_path: Path, bert: Path, file: str, value: object, complaint: str
) -> None:
    directory = with_dense(bert, tmp_path)
    (directory / file).write_text(json.dumps(value))
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=complaint):
        open_checkpoint(directory)


def test_modules_in_another_order_are_refused(tmp_path: Path, bert: Path) -> None:
    directory = add_modules(copy(bert, tmp_path))
    modules = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([modules[0], modules[2], modules[1]]))
    with pytest.raises(UnsupportedModel, match="Transformer, Normalize, Pooling"):
        open_checkpoint(directory)


@pytest.mark.parametrize("tensor", [torch.zeros(8, 31), torch.zeros(8), torch.full((8, 32), 1, dtype=torch.int32)])
def test_a_dense_module_with_other_weights_is_refused_with_the_tensor(
    tmp_path: Path, bert: Path, tensor: torch.Tensor
) -> None:
    directory = with_dense(bert, tmp_path)
    save_file({"linear.weight": tensor, "linear.bias": torch.zeros(8)}, directory / "2_Dense" / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"linear\.weight"):
        LLM(directory)


def test_a_dense_modules_config_alone_allocates_nothing(tmp_path: Path, bert: Path) -> None:
    """Four tebibytes."""
    directory = with_dense(bert, tmp_path)
    second = directory / "3_Dense"
    shutil.copytree(directory / "2_Dense", second)
    modules = json.loads((directory / "modules.json").read_text())
    at = next(at for at, each in enumerate(modules) if each["path"] == "2_Dense")
    modules.insert(at + 1, {**modules[at], "path": "3_Dense"})
    (directory / "modules.json").write_text(json.dumps(modules))
    for folder, (columns, rows) in {"2_Dense": (32, 1 << 20), "3_Dense": (1 << 20, 1 << 20)}.items():
        sizes = {"in_features": columns, "out_features": rows}
        (directory / folder / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(BadCheckpoint, match=r"linear\.weight"):
        LLM(directory)


def test_a_dense_module_without_weights_is_refused(tmp_path: Path, bert: Path) -> None:
    directory = with_dense(bert, tmp_path)
    (directory / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(OstroError, match="2_Dense"):
        LLM(directory)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quantize": "int8"}, "quantize"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"kv_memory": 1 << 20}, "kv_memory"),
        ({"page_size": 16}, "page_size"),
        ({"hrm_steps": 2}, "hrm_steps"),
        ({"backend": "native"}, "backend"),
    ],
)
def test_settings_that_mean_nothing_to_an_encoder_are_refused_when_loading_and_planning(
    bert: Path, settings: Mapping[str, object], name: str
) -> None:
    checkpoint = open_checkpoint(bert)
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    for attempt in (lambda: load_runner(checkpoint, config), lambda: plan(checkpoint, config, memory=1 << 30)):
        with pytest.raises((BadRequest, Unsupported), match=name):
            attempt()


def test_jax_refuses_encoders_by_name(bert: Path) -> None:
    checkpoint = open_checkpoint(bert)
    with pytest.raises(UnsupportedModel, match="JAX backend cannot run this model: it is an encoder"):
        plan(checkpoint, EngineConfig(backend="jax", device="cpu"), memory=1 << 30)


def test_a_plan_knows_that_there_is_no_kv_cache(tmp_path: Path) -> None:
    model = reference(CASES["bert"])
    found = plan(open_checkpoint(write_encoder(tmp_path, model)), EngineConfig(), memory=1 << 30)
    pooler = 32 * 32 + 32
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters()) - pooler
    assert (found.kv_bytes, found.max_seq_len, found.fits) == (0, 40, True)
    assert found.not_native == "its heads are 8 wide, not a multiple of 16 up to 256"


@needs_library
def test_a_plan_is_within_a_tenth_of_what_the_native_core_packs(tmp_path: Path) -> None:
    model = reference(WIDE["bert"])
    found = plan(open_checkpoint(write_encoder(tmp_path, model)), EngineConfig(), memory=1 << 30)
    assert (found.kv_bytes, found.max_seq_len, found.fits, found.not_native) == (0, 320, True, None)
    assert found.backend.startswith("native")
    pooler = 64 * 64 + 64
    weights = 4 * (sum(parameter.numel() for parameter in model.parameters()) - pooler)
    assert weights < found.weights_bytes < 1.1 * weights


def test_a_classifier_has_no_pooling_and_modules_do_not_change_that(tmp_path: Path, bert: Path) -> None:
    directory = add_modules(write_encoder(tmp_path, reference(CASES["bert"], labels=1)))
    assert open_checkpoint(directory).pooling is None
    assert open_checkpoint(bert).pooling == Pooling("mean", normalize=False, keeps_start=True)
    write_json(directory / "config.json", {"architectures": ["BertForTokenClassification"], "model_type": "bert"})
    with pytest.raises(UnsupportedModel, match="BertForTokenClassification"):
        describe(open_checkpoint(directory).config)
