import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from model_directory import write_pickles
from safetensors.torch import save_file

from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from ostro.weights import Pooling, open_checkpoint

LLAMA: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}
WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(32.0).reshape(4, 8),
    "model.layers.0.self_attn.q_proj.weight": torch.ones(8, 8, dtype=torch.bfloat16),
    "model.norm.weight": torch.ones(8, dtype=torch.float16),
    "lm_head.weight": torch.zeros(4, 8),
}


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def make_model(
    directory: Path, config: Mapping[str, object] = LLAMA, weights: Mapping[str, torch.Tensor] = WEIGHTS
) -> Path:
    write_json(directory / "config.json", config)
    save_file(dict(weights), directory / "model.safetensors")
    return directory


def make_sharded(directory: Path) -> Path:
    write_json(directory / "config.json", LLAMA)
    names = list(WEIGHTS)
    places = {name: f"model-{1 + index // 2:05}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: WEIGHTS[name] for name in names if places[name] == file}, directory / file)
    write_json(directory / "model.safetensors.index.json", {"weight_map": places})
    return directory


def loaded(ref: Path) -> dict[str, torch.Tensor]:
    return dict(open_checkpoint(ref).tensors())


def names_of(directory: Path, config: Mapping[str, object], *names: str) -> set[str]:
    """The canonical names of a model that stores these."""
    make_model(directory, config, {name: torch.zeros(2) for name in names})
    return set(loaded(directory))


@pytest.mark.parametrize("make", [make_model, make_sharded])
def test_weights_come_back_as_they_were_saved(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    tensors = loaded(make(tmp_path / "tiny"))
    assert tensors.keys() == WEIGHTS.keys()
    assert all(
        torch.equal(tensors[name], WEIGHTS[name]) and tensors[name].dtype == WEIGHTS[name].dtype for name in WEIGHTS
    )


def test_config_name_and_paths_are_reported(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "tiny")
    write_json(directory / "generation_config.json", {"eos_token_id": [2, 3]})
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config == LLAMA | {"tie_word_embeddings": False}
    assert checkpoint.generation_config == {"eos_token_id": [2, 3]}
    assert (checkpoint.name, checkpoint.path, checkpoint.tokenizer_path) == ("tiny", directory, directory)
    assert checkpoint.pooling is None


def test_one_safetensors_file_opens_with_the_config_beside_it(tmp_path: Path) -> None:
    path = make_model(tmp_path / "tiny") / "model.safetensors"
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.name, checkpoint.path, checkpoint.tokenizer_path) == ("tiny", path, path.parent)
    assert loaded(path).keys() == WEIGHTS.keys()


def test_one_of_several_files_points_at_the_directory(tmp_path: Path) -> None:
    path = make_sharded(tmp_path / "tiny") / "model-00001-of-00002.safetensors"
    with pytest.raises(ModelNotFound, match=r"one of several files of a model\. Give its directory"):
        open_checkpoint(path)


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 40, -10])
def test_a_truncated_file_is_refused_with_its_name(tmp_path: Path, keep: int) -> None:
    path = make_model(tmp_path / "tiny") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is damaged .* Download it again") as caught:
        open_checkpoint(tmp_path / "tiny")
    assert "\n" not in caught.value.message


def test_a_header_that_claims_more_than_the_file_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path / "tiny") / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(BadCheckpoint, match="damaged"):
        open_checkpoint(tmp_path / "tiny")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = make_sharded(tmp_path / "tiny")
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"names model-00002-of-00002\.safetensors, which is missing"):
        open_checkpoint(directory)


def test_a_shard_without_a_promised_tensor_is_named(tmp_path: Path) -> None:
    directory = make_sharded(tmp_path / "tiny")
    save_file({"other": torch.ones(1)}, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(BadCheckpoint, match=r"model-00002-of-00002\.safetensors lacks the tensor 'lm_head\.weight'"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    "place", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", 3, ".."]
)
def test_an_index_that_points_outside_its_directory_is_refused(tmp_path: Path, place: object) -> None:
    directory = make_sharded(tmp_path / "tiny")
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    write_json(directory / "model.safetensors.index.json", {"weight_map": {"model.norm.weight": place}})
    with pytest.raises(BadCheckpoint, match=r"no \*\.safetensors file beside it"):
        open_checkpoint(directory)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, index: object) -> None:
    directory = make_sharded(tmp_path / "tiny")
    write_json(directory / "model.safetensors.index.json", index)
    with pytest.raises(BadCheckpoint, match="has no weight_map"):
        open_checkpoint(directory)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "tiny")
    (directory / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no file .*config\.json"):
        open_checkpoint(directory)


@pytest.mark.parametrize("text", ["{", "", "\ufeff\x00", '{"a": ' + "[" * 100_000])
def test_a_malformed_config_is_named(tmp_path: Path, text: str) -> None:
    directory = make_model(tmp_path / "tiny")
    (directory / "config.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"config\.json is not valid JSON"):
        open_checkpoint(directory)


@pytest.mark.parametrize("text", ["[]", "3", '"text"', "null"])
def test_a_config_that_is_not_an_object_is_named(tmp_path: Path, text: str) -> None:
    directory = make_model(tmp_path / "tiny")
    (directory / "config.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"config\.json should hold a JSON object"):
        open_checkpoint(directory)


def test_a_directory_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    with pytest.raises(ModelNotFound, match=r"holds no weights that Ostro reads: model\.safetensors,"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("method", ["aqlm", "hqq", "quark", "torchao"])
def test_a_quantised_checkpoint_is_refused_with_its_method(tmp_path: Path, method: str) -> None:
    make_model(tmp_path, LLAMA | {"quantization_config": {"quant_method": method}})
    with pytest.raises(UnsupportedModel, match=rf"quantised with {method}.* Use the original model"):
        open_checkpoint(tmp_path)


# --- pickles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "brain.pt"])
def test_a_named_pickle_of_tensors_opens(tmp_path: Path, wrap: str | None, file: str) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    torch.save({wrap: WEIGHTS, "step": 3} if wrap else WEIGHTS, tmp_path / file)
    tensors = loaded(tmp_path / file)
    assert tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(tensors[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_pickle_from_before_archives_opens(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    torch.save(WEIGHTS, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    tensors = loaded(tmp_path / "old.bin")
    assert all(torch.equal(tensors[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_directory_of_pickles_opens(tmp_path: Path, num_files: int) -> None:
    """It asked for the file to be named, and of several files none could be."""
    write_json(tmp_path / "config.json", LLAMA)
    write_pickles(tmp_path, WEIGHTS, num_files)
    tensors = loaded(tmp_path)
    assert tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(tensors[name], WEIGHTS[name]) for name in WEIGHTS)


def test_safetensors_win_over_pickles(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_text("no pickle at all")
    assert loaded(tmp_path).keys() == WEIGHTS.keys()


def test_a_missing_pickle_named_by_the_index_is_reported(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    write_pickles(tmp_path, WEIGHTS, 2)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ModelNotFound, match=r"names pytorch_model-00002-of-00002\.bin, which is missing"):
        open_checkpoint(tmp_path)


def test_another_pickle_in_a_directory_must_be_named(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    torch.save(WEIGHTS, tmp_path / "brain.pt")
    with pytest.raises(ModelNotFound, match=r"only when you name the file itself: .*brain\.pt"):
        open_checkpoint(tmp_path)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


def test_a_pickle_with_code_in_it_is_refused_unrun(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    torch.save({"w": Bomb(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(BadCheckpoint, match=r"evil\.pt holds more than tensors"):
        loaded(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_a_damaged_pickle_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    torch.save(WEIGHTS, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:100])
    with pytest.raises(BadCheckpoint, match=r"cut\.pt"):
        loaded(tmp_path / "cut.pt")


def test_a_pickle_without_tensors_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", LLAMA)
    torch.save({"step": 3}, tmp_path / "none.pt")
    with pytest.raises(BadCheckpoint, match=r"none\.pt holds no named tensors"):
        loaded(tmp_path / "none.pt")


# --- names ----------------------------------------------------------------------------------------------------------


def test_gpt2_names_get_their_prefix_and_lose_their_masks(tmp_path: Path) -> None:
    stored = ("wte.weight", "h.0.attn.c_attn.bias", "h.0.attn.bias", "h.0.attn.masked_bias", "ln_f.weight")
    assert names_of(tmp_path, {"model_type": "gpt2"}, *stored) == {
        "transformer.wte.weight",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.ln_f.weight",
    }


def test_gpt_neox_has_names_of_its_own_for_its_backbone_and_its_head(tmp_path: Path) -> None:
    config = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
    stored = ("gpt_neox.embed_in.weight", "embed_out.weight", "gpt_neox.layers.0.attention.bias")
    buffers = ("gpt_neox.layers.0.attention.masked_bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq")
    assert names_of(tmp_path / "whole", config, *stored, *buffers) == set(stored[:2])
    assert names_of(tmp_path / "tied", {**config, "tie_word_embeddings": True}, *stored) == {stored[0]}
    bare = {**config, "architectures": ["GPTNeoXModel"]}
    assert names_of(tmp_path / "bare", bare, "embed_in.weight") == {stored[0]}


def test_names_of_a_bare_decoder_get_their_prefix(tmp_path: Path) -> None:
    stored = (
        "embed_tokens.weight",
        "layers.0.mlp.up_proj.weight",
        "norm.weight",
        "layers.0.self_attn.rotary_emb.inv_freq",
    )
    assert names_of(tmp_path, LLAMA, *stored) == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    }


def test_marks_of_torch_compile_are_dropped(tmp_path: Path) -> None:
    assert names_of(tmp_path, LLAMA, "_orig_mod.model.norm.weight") == {"model.norm.weight"}


def test_a_tied_output_is_not_given_twice(tmp_path: Path) -> None:
    stored = ("model.embed_tokens.weight", "lm_head.weight")
    assert names_of(tmp_path / "tied", LLAMA | {"tie_word_embeddings": True}, *stored) == {stored[0]}
    assert names_of(tmp_path / "gemma", {"model_type": "gemma2"}, *stored) == {stored[0]}
    assert names_of(tmp_path / "untied", LLAMA, *stored) == set(stored)


@pytest.mark.parametrize(
    "config",
    [{"architectures": ["Gemma2ForCausalLM"]}, {"model_type": "gemma2", "tie_word_embeddings": None}],
    ids=["no model_type", "null"],
)
def test_a_config_that_does_not_say_whether_the_output_is_tied_means_what_its_family_does(
    tmp_path: Path, config: dict[str, object]
) -> None:
    """By `architectures` as well: without a `model_type`, Gemma's output was looked for in files that have none."""
    stored = ("model.embed_tokens.weight", "lm_head.weight")
    assert names_of(tmp_path, config, *stored) == {stored[0]}
    assert open_checkpoint(tmp_path).config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    "stored",
    [
        (
            "language_model.model.embed_tokens.weight",
            "language_model.model.layers.0.mlp.up_proj.weight",
            "vision_tower.vision_model.head.weight",
            "multi_modal_projector.mm_soft_emb_norm.weight",
        ),
        (
            "model.language_model.embed_tokens.weight",
            "model.language_model.layers.0.mlp.up_proj.weight",
            "model.vision_tower.vision_model.head.weight",
            "model.multi_modal_projector.mm_soft_emb_norm.weight",
            "lm_head.weight",
        ),
    ],
)
def test_a_multimodal_gemma_is_served_as_its_language_model(tmp_path: Path, stored: tuple[str, ...]) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "vision_config": {"hidden_size": 99},
        "text_config": {"model_type": "gemma3_text", "hidden_size": 8},
    }
    assert names_of(tmp_path, config, *stored) == {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}
    assert open_checkpoint(tmp_path).config == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "eos_token_id": [1, 106],
        "hidden_size": 8,
        "tie_word_embeddings": True,
    }


def test_keys_and_values_that_no_layer_of_gemma_4_reads_are_left_out(tmp_path: Path) -> None:
    """Published checkpoints hold them, for layers that read those of earlier ones."""
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {"model_type": "gemma4_text", "num_hidden_layers": 3, "num_kv_shared_layers": 1},
    }
    parts = [f"layers.{layer}.self_attn.{part}.weight" for layer in (1, 2) for part in ("q_proj", "k_proj", "v_norm")]
    stored = [f"model.language_model.{part}" for part in parts]
    stored += ["model.embed_vision.embedding_projection.weight", "model.audio_tower.layers.0.norm.weight"]
    assert names_of(tmp_path, config, *stored) == {f"model.{part}" for part in parts[:4]}


# --- pooling --------------------------------------------------------------------------------------------------------


def make_embedding_model(directory: Path, pooling: object, *modules: str, folder: str = "1_Pooling") -> Path:
    make_model(directory)
    kinds = [("Transformer", ""), ("Pooling", folder), *((module, f"2_{module}") for module in modules)]
    write_json(
        directory / "modules.json",
        [
            {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds)
        ],
    )
    write_json(directory / "1_Pooling" / "config.json", pooling)
    return directory


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": False}, "lasttoken"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_pooling_of_an_embedding_model_is_read(tmp_path: Path, config: object, mode: str) -> None:
    plain = open_checkpoint(make_embedding_model(tmp_path / "plain", config)).pooling
    normalised = open_checkpoint(make_embedding_model(tmp_path / "normal", config, "Normalize")).pooling
    assert (plain, normalised) == (Pooling(mode, normalize=False), Pooling(mode, normalize=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [{"pooling_mode_max_tokens": True}, {}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}],
)
def test_an_unknown_pooling_is_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(UnsupportedModel, match="Ostro pools by mean, cls, lasttoken"):
        open_checkpoint(make_embedding_model(tmp_path, config))


def test_a_dense_module_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    directory = make_embedding_model(tmp_path, {"pooling_mode_cls_token": True}, "Dense")
    write_json(directory / "2_Dense" / "config.json", {"in_features": 8, "out_features": 8})
    with pytest.raises(UnsupportedModel, match="with a Dense module"):
        open_checkpoint(directory)


def test_modules_that_point_outside_their_directory_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"pooling_mode_cls_token": True})
    with pytest.raises(BadCheckpoint, match="points outside its directory"):
        open_checkpoint(make_embedding_model(tmp_path / "tiny", {}, folder=".."))
