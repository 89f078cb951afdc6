"""HRM checkpoints: every layout, the order of trust, and errors that say what is missing and where."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from hrm_brain import random_weights, write_brain
from model_directory import write_model
from safetensors.torch import save_file
from torch import Tensor

from ostro import LLM, SamplingParams
from ostro.config import EngineConfig
from ostro.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from ostro.formats.torch_archive import tensor_shapes
from ostro.torch_models.hrm import HrmConfig, load_hrm
from ostro.torch_models.ragged import Ragged
from ostro.weights.checkpoint import Checkpoint, open_checkpoint
from ostro.weights.hrm_checkpoint import is_hrm, is_starter, open_hrm, starter_base
from ostro.weights.hrm_settings import HrmSettings

WEIGHTS = random_weights()
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
ARCH_YAML = "arch:\n  num_heads: 4\n  H_cycles: 2\n  L_cycles: 3\n"
ARCH: Mapping[str, object] = {"num_heads": 4, "h_cycles": 2, "l_cycles": 3, "halt_max_steps": 5, "seq_len": 64}


def make_brain(directory: Path, brain: object = ARCH, weights: Mapping[str, Tensor] = WEIGHTS) -> Path:
    """A bundle whose brain.json says just this; its weights' file."""
    directory.mkdir(parents=True, exist_ok=True)
    if brain is not None:
        write_json(directory / "brain.json", brain)
    save_file(dict(weights), directory / "actv1_student.safetensors")
    return directory / "actv1_student.safetensors"


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def without(*keys: str) -> dict[str, object]:
    return {key: value for key, value in ARCH.items() if key not in keys}


def assert_same_tensors(checkpoint: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    found = dict(checkpoint.tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["mind/actv1_student.safetensors", "mind", "."])
def test_a_brain_opens_by_its_file_its_directory_and_its_root(tmp_path: Path, given: str) -> None:
    write_brain(tmp_path / "thinker")
    path = tmp_path / "thinker" / given
    assert is_hrm(path)
    checkpoint = open_hrm(path)
    assert (checkpoint.path, checkpoint.name) == (path, "thinker")
    assert (checkpoint.generation_config, checkpoint.pooling) == ({}, None)
    assert_same_tensors(checkpoint, WEIGHTS)


def test_weights_beside_brain_json_and_in_a_directory_of_another_name_are_found(tmp_path: Path) -> None:
    make_brain(tmp_path / "flat")
    assert open_hrm(tmp_path / "flat").weights == tmp_path / "flat" / "actv1_student.safetensors"
    file = write_brain(tmp_path / "other")
    file.parent.rename(tmp_path / "other" / "student")
    assert is_hrm(tmp_path / "other")
    assert open_hrm(tmp_path / "other").name == "other"


def test_the_config_of_a_brain(tmp_path: Path) -> None:
    assert open_hrm(write_brain(tmp_path, moe=True)).config == {
        "architectures": ["HrmActV1"],
        "model_type": "hrm_act_v1",
        "tie_word_embeddings": False,
        "dialect": "aios",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "settings_files": str(tmp_path / "brain.json"),
        "num_heads": 4,
        "H_cycles": 2,
        "L_cycles": 2,
        "H_layers": 2,
        "L_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "halt_max_steps": 4,
        "pos_encodings": "rope",
        "seq_len": 128,
    }


@pytest.mark.parametrize("dialect", ["aios", "upstream"])
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_what_is_written_loads_and_runs(tmp_path: Path, dialect: str, moe: bool, positions: str) -> None:
    path = write_brain(tmp_path, dialect=dialect, moe=moe, positions=positions, puzzle_size=40)  # type: ignore[arg-type]
    checkpoint = open_hrm(path)
    model = load_hrm(HrmConfig.read(checkpoint.config), checkpoint.tensors(), torch.float32)
    layout = Ragged([model.config.puzzle_len + 3], torch.device("cpu"))
    carry = model.advance(model.start(layout), model.embed(torch.tensor([1, 2, 3]), layout), layout)
    assert model.head(carry.z_h).isfinite().all()
    assert model.config.dialect == dialect


def test_a_legacy_pickle_is_read_when_it_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "brain.json", ARCH)
    torch.save({"model_state_dict": WEIGHTS, "step": 7}, tmp_path / "actv1_student.pt")
    checkpoint = open_hrm(tmp_path / "actv1_student.pt")
    assert is_hrm(tmp_path / "actv1_student.pt")
    assert checkpoint.config["H_layers"] == 2
    assert_same_tensors(checkpoint, WEIGHTS)


def test_a_legacy_pickle_is_found_in_its_directory(tmp_path: Path) -> None:
    write_json(tmp_path / "brain.json", ARCH)
    torch.save(WEIGHTS, tmp_path / "actv1_student.pt")
    assert is_hrm(tmp_path)
    assert_same_tensors(open_hrm(tmp_path), WEIGHTS)


def test_safetensors_win_over_the_legacy_pickle(tmp_path: Path) -> None:
    make_brain(tmp_path)
    torch.save({}, tmp_path / "actv1_student.pt")
    assert open_hrm(tmp_path).weights.suffix == ".safetensors"


def test_a_step_of_upstreams_trainer_opens(tmp_path: Path) -> None:
    path = write_brain(tmp_path / "run", dialect="upstream", puzzle_size=40)
    checkpoint = open_hrm(path)
    assert is_hrm(path)
    assert checkpoint.name == "run-step_100"
    config = checkpoint.config
    assert (config["dialect"], config["puzzle_emb_ndim"], config["num_puzzle_identifiers"]) == ("upstream", 40, 3)
    assert_same_tensors(checkpoint, random_weights(puzzle_size=40, scaled=True))


@pytest.mark.parametrize("given", [".", "checkpoint"])
def test_what_upstream_publishes_opens_by_its_directory_and_its_file(tmp_path: Path, given: str) -> None:
    """It has no suffix, and stands beside all_config.yaml with the code that made it."""
    write_brain(tmp_path / "sudoku", dialect="upstream", puzzle_size=40).rename(tmp_path / "sudoku" / "checkpoint")
    (tmp_path / "sudoku" / "losses.py").write_text("raise SystemExit('ran')")
    assert is_hrm(tmp_path / "sudoku" / given)
    checkpoint = open_checkpoint(tmp_path / "sudoku" / given)
    assert (checkpoint.name, checkpoint.config["dialect"]) == ("sudoku", "upstream")
    assert_same_tensors(checkpoint, random_weights(puzzle_size=40, scaled=True))


def test_directory_of_steps_opens_at_the_last_step_unless_a_checkpoint_is_published(tmp_path: Path) -> None:
    write_brain(tmp_path / "run", dialect="upstream").rename(tmp_path / "run" / "step_90")
    shutil.copy(tmp_path / "run" / "step_90", tmp_path / "run" / "step_1000")
    assert is_hrm(tmp_path / "run")
    assert open_hrm(tmp_path / "run").name == "run-step_1000"
    shutil.copy(tmp_path / "run" / "step_90", tmp_path / "run" / "checkpoint")
    assert open_hrm(tmp_path / "run").weights.name == "checkpoint"


def test_a_step_without_a_context_needs_the_setting(tmp_path: Path) -> None:
    path = write_brain(tmp_path, dialect="upstream")
    settings = yaml.safe_load((tmp_path / "all_config.yaml").read_text())
    del settings["arch"]["seq_len"]
    (tmp_path / "all_config.yaml").write_text(yaml.safe_dump(settings))
    config = open_hrm(path).config
    assert "seq_len" not in config
    with pytest.raises(BadCheckpoint, match="--max-seq-len"):
        HrmConfig.read(config)
    assert HrmConfig.read(config, max_seq_len=99).seq_len == 99


@pytest.mark.parametrize("prefix", ["_orig_mod.", "model.", "_orig_mod.model.", "model._orig_mod."])
def test_prefixes_are_stripped(tmp_path: Path, prefix: str) -> None:
    path = make_brain(tmp_path, weights={prefix + name: tensor for name, tensor in WEIGHTS.items()})
    assert_same_tensors(open_hrm(path), WEIGHTS)


def test_weights_of_another_name_are_known_by_their_tensors(tmp_path: Path) -> None:
    path = make_brain(tmp_path / "brain").rename(tmp_path / "brain" / "best.safetensors")
    assert is_hrm(path)
    assert open_hrm(path).name == "best"
    assert open_hrm(path, name="mine").name == "mine"


def test_other_checkpoints_are_not_opened_as_hrm(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"nothing")
    torch.save({"model.norm.weight": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    torch.save(WEIGHTS, tmp_path / "step_7")
    names = (".", "model.safetensors", "damaged.safetensors", "pytorch_model.bin", "step_7", "missing")
    assert not any(is_hrm(tmp_path / name) for name in names)
    (tmp_path / "all_config.yaml").write_text("arch: [")
    assert not is_hrm(tmp_path)
    write_json(tmp_path / "brain.json", ARCH)
    torch.save(WEIGHTS, tmp_path / "q_head.pt")
    assert not is_hrm(tmp_path / "q_head.pt")
    assert is_hrm(tmp_path / "step_7")


def test_the_tokenizer_is_looked_for_beside_the_brain(tmp_path: Path) -> None:
    path = write_brain(tmp_path)
    with pytest.raises(
        ModelNotFound, match=r"no tokenizer\.json or vocab\.txt with .*Give --tokenizer ORG/NAME"
    ) as caught:
        _ = open_hrm(path).tokenizer_path
    assert caught.value.param == "tokenizer"
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").touch()
    assert open_hrm(path).tokenizer_path == tmp_path / "tokenizer"
    (path.parent / "vocab.txt").touch()
    assert open_hrm(path).tokenizer_path == path.parent


@pytest.mark.parametrize("base", ["cwd", "brain"])
def test_the_tokenizer_that_a_brain_names_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    """AI-OS writes `tokenizer_model` as a path from its working directory."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    path = make_brain(tmp_path / "brain", {**ARCH, "tokenizer_model": "artifacts/gpt2"})
    (tmp_path / base / "artifacts" / "gpt2").mkdir(parents=True)
    (tmp_path / base / "artifacts" / "gpt2" / "tokenizer.json").touch()
    assert open_hrm(path).tokenizer_path.samefile(tmp_path / base / "artifacts" / "gpt2")


def test_opening_imports_no_torch(tmp_path: Path) -> None:
    paths = [write_brain(tmp_path / "brain"), write_brain(tmp_path / "run", dialect="upstream")]
    code = (
        "import sys; from pathlib import Path; from ostro.weights.hrm_checkpoint import is_hrm, open_hrm\n"
        f"for path in {[str(path) for path in paths]}: assert is_hrm(Path(path)); open_hrm(Path(path))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what the files tell --------------------------------------------------------------------------------------------


def test_the_top_level_is_trusted_before_arch_and_arch_before_the_last_session(tmp_path: Path) -> None:
    brain = {
        "num_heads": 4,
        "arch": {"num_heads": 8, "H_cycles": 3},
        "last_session": {"config": {"num_heads": 16, "h_cycles": 5, "L_cycles": 6}},
    }
    path = make_brain(tmp_path, brain)
    write_json(tmp_path / "checkpoint_metadata.json", {"l_cycles": 9, "halt_max_steps": 7, "config": {"seq_len": 33}})
    config = open_hrm(path).config
    assert (config["num_heads"], config["H_cycles"], config["L_cycles"]) == (4, 3, 6)
    assert (config["halt_max_steps"], config["seq_len"]) == (7, 33)


def test_null_counts_as_absent(tmp_path: Path) -> None:
    path = make_brain(tmp_path, {**ARCH, "num_heads": None, "arch": {"num_heads": 2}, "last_session": None})
    assert open_hrm(path).config["num_heads"] == 2


def test_arch_is_asked_before_the_trainers_own_settings(tmp_path: Path) -> None:
    path = write_brain(tmp_path, dialect="upstream")
    settings = yaml.safe_load((tmp_path / "all_config.yaml").read_text())
    (tmp_path / "all_config.yaml").write_text(yaml.safe_dump({**settings, "seq_len": 5, "rope_theta": 7.0}))
    config = open_hrm(path).config
    assert (config["seq_len"], config["rope_theta"]) == (128, 7.0)


def test_upstreams_settings_beside_a_step_win_over_a_brain_above(tmp_path: Path) -> None:
    write_json(tmp_path / "brain.json", ARCH)
    assert open_hrm(write_brain(tmp_path / "run", dialect="upstream")).config["dialect"] == "upstream"


def test_an_explicit_dialect_wins(tmp_path: Path) -> None:
    assert open_hrm(make_brain(tmp_path, {**ARCH, "arch": {"dialect": "upstream"}})).config["dialect"] == "upstream"


def test_metadata_alone_does_not_identify_a_dialect(tmp_path: Path) -> None:
    path = make_brain(tmp_path, None).rename(tmp_path / "best.safetensors")
    write_json(tmp_path / "checkpoint_metadata.json", {"arch": ARCH})
    config = open_hrm(path).config
    assert "dialect" not in config
    with pytest.raises(UnsupportedModel, match="--hrm-dialect"):
        HrmConfig.read(config)
    assert HrmConfig.read(config, dialect="upstream").halt_max_steps == 5


@pytest.mark.parametrize(("told", "words"), [(290, "the rest is cut off"), (310, "untrained rows are added")])
def test_tables_are_resized_to_the_vocabulary_of_the_brain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, told: int, words: str
) -> None:
    """As in AI-OS, brain.json decides, not the rows that were saved."""
    checkpoint = open_hrm(make_brain(tmp_path, {**ARCH, "vocab_size": told}))
    found, again = dict(checkpoint.tensors()), dict(checkpoint.tensors())
    for name in ("inner.embed_tokens.embedding_weight", "inner.lm_head.weight"):
        held = min(told, 300)
        assert found[name].shape == (told, 32)
        assert torch.equal(found[name][:held], WEIGHTS[name][:held])
        assert torch.equal(found[name], again[name])
        assert found[name].isfinite().all()
    assert f"vocabulary has {told} tokens, and the weights have 300: {words}" in caplog.text
    assert load_hrm(HrmConfig.read(checkpoint.config), found.items(), torch.float32).config.vocab_size == told


def test_upstreams_vocabulary_must_be_the_tensors(tmp_path: Path) -> None:
    path = write_brain(tmp_path, dialect="upstream")
    (tmp_path / "all_config.yaml").write_text(ARCH_YAML + "  vocab_size: 290\n")
    with pytest.raises(BadCheckpoint, match=r"all_config\.yaml, arch: 'vocab_size' is 290, .* say 300"):
        open_hrm(path)


@pytest.mark.parametrize("prefix", ["", "q_head."])
def test_a_q_head_in_a_file_of_its_own_is_used_where_the_weights_have_none(tmp_path: Path, prefix: str) -> None:
    headless = {name: tensor for name, tensor in WEIGHTS.items() if "q_head" not in name}
    head = {"weight": torch.full((2, 32), 0.5), "bias": torch.tensor([1.0, -1.0])}
    path = make_brain(tmp_path, ARCH, headless)
    torch.save({prefix + name: tensor for name, tensor in head.items()}, tmp_path / "q_head.pt")
    checkpoint = open_hrm(path)
    assert_same_tensors(checkpoint, headless | {f"inner.q_head.{name}": tensor for name, tensor in head.items()})
    model = load_hrm(HrmConfig.read(checkpoint.config), checkpoint.tensors(), torch.float32)
    layout = Ragged([3], torch.device("cpu"))
    carry = model.advance(model.start(layout), model.embed(torch.tensor([1, 2, 3]), layout), layout)
    state = carry.z_h[0].sum() * 0.5
    torch.testing.assert_close(model.halting(carry, layout)[0], torch.stack([state + 1, state - 1]))


def test_the_weights_own_q_head_wins_over_the_file(tmp_path: Path) -> None:
    path = make_brain(tmp_path)
    torch.save({"weight": torch.zeros(2, 32), "bias": torch.zeros(2)}, tmp_path / "q_head.pt")
    assert_same_tensors(open_hrm(path), WEIGHTS)


def test_weights_without_any_q_head_are_named(tmp_path: Path) -> None:
    path = make_brain(tmp_path, ARCH, {name: tensor for name, tensor in WEIGHTS.items() if "q_head" not in name})
    checkpoint = open_hrm(path)
    with pytest.raises(BadCheckpoint, match=r"lacks 2 tensors \(inner\.q_head"):
        load_hrm(HrmConfig.read(checkpoint.config), checkpoint.tensors(), torch.float32)


@pytest.mark.parametrize("halting", [False, True])
def test_a_brain_without_a_q_head_answers_where_halting_is_off(tmp_path: Path, halting: bool) -> None:
    make_brain(tmp_path, ARCH, {name: tensor for name, tensor in WEIGHTS.items() if "q_head" not in name})
    config = EngineConfig(threads=1, hrm_halting=halting, hrm_steps=2, tokenizer=str(write_model(tmp_path / "tok")))
    if halting:
        with pytest.raises(BadCheckpoint, match=r"lacks 2 tensors \(inner\.q_head"):
            LLM(tmp_path, config)
        return
    paths = (make_brain(tmp_path / "whole"), tmp_path / "actv1_student.safetensors")
    whole, headless = (LLM(path, config).generate([[1, 2, 3]], GREEDY)[0].text for path in paths)
    assert headless == whole


# --- what the operator tells ----------------------------------------------------------------------------------------

FLAGS: Mapping[str, int] = {"num_heads": 4, "H_cycles": 2, "L_cycles": 3}


@pytest.mark.parametrize("file", ["weights.pt", "weights.safetensors"])
def test_weights_without_any_file_run_with_the_operators_settings(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    save_file(WEIGHTS, path) if path.suffix == ".safetensors" else torch.save(WEIGHTS, path)
    assert is_hrm(path)
    opened = open_hrm(path)
    with pytest.raises(BadCheckpoint, match=r"There is no brain\.json, .*--hrm-config, or --num-heads and --h-cycles"):
        HrmConfig.read(opened.config)
    told = opened.with_settings(HrmSettings(None, FLAGS))
    config = HrmConfig.read(told.config, dialect="aios", max_seq_len=64)
    assert (config.num_heads, config.h_cycles, config.l_cycles, config.h_layers) == (4, 2, 3, 2)
    assert_same_tensors(told, WEIGHTS)


@pytest.mark.parametrize("file", ["actv1_student.pt", "actv1_student.safetensors"])
def test_ai_os_names_of_weights_tell_the_dialect_where_there_is_no_brain_json(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    save_file(WEIGHTS, path) if path.suffix == ".safetensors" else torch.save(WEIGHTS, path)
    told = open_hrm(path).with_settings(HrmSettings(None, FLAGS))
    assert HrmConfig.read(told.config, max_seq_len=64).dialect == "aios"


def test_everything_that_is_missing_is_listed_at_once(tmp_path: Path) -> None:
    """Each flag that was added used to bring the next error."""
    path = make_brain(tmp_path, None)
    flags = r"or --num-heads and --h-cycles and --l-cycles and --max-seq-len\."
    with pytest.raises(BadCheckpoint, match=flags):
        HrmConfig.read(open_hrm(path).config)
    other = path.rename(tmp_path / "best.safetensors")
    told = open_hrm(other).with_settings(HrmSettings(None, {"num_heads": 4}))
    with pytest.raises(BadCheckpoint, match=r"or --h-cycles and --l-cycles and --hrm-dialect upstream or aios\."):
        HrmConfig.read(told.config, max_seq_len=64)


def test_operator_settings_win_over_the_named_file_and_that_over_neighbouring_files(
    tmp_path: Path,
) -> None:
    path = make_brain(tmp_path, {**ARCH, "num_heads": 8, "h_cycles": 9})
    write_json(tmp_path / "own.json", {"num_heads": 2, "arch": {"h_cycles": 5}})
    told = open_hrm(path).with_settings(HrmSettings(tmp_path / "own.json", {"num_heads": 16, "H_cycles": None}))
    assert [told.config[key] for key in ("num_heads", "H_cycles", "L_cycles")] == [16, 5, 3]
    assert told.config["dialect"] == "aios"


@pytest.mark.parametrize(
    ("name", "text", "dialect"),
    [
        ("brain.json", json.dumps(ARCH), "aios"),
        ("thinker.json", json.dumps({"type": "actv1", **ARCH}), "aios"),
        ("all_config.yaml", ARCH_YAML, "upstream"),
        ("own.yaml", ARCH_YAML + "dialect: aios\n", "aios"),
        ("own.yaml", ARCH_YAML, None),
    ],
)
def test_a_file_that_is_named_tells_the_architecture_and_by_its_name_the_dialect(
    tmp_path: Path, name: str, text: str, dialect: str | None
) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / name).write_text(text)
    settings = HrmSettings(tmp_path / "elsewhere" / name, {})
    config = open_hrm(tmp_path / "w.safetensors").with_settings(settings).config
    assert (config["num_heads"], config["L_cycles"], config.get("dialect")) == (4, 3, dialect)


def test_layers_that_contradict_the_weights_are_refused_from_any_source(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"The settings: 'H_layers' is 5, but the tensors' shapes say 2"):
        open_hrm(make_brain(tmp_path)).with_settings(HrmSettings(None, {"H_layers": 5}))


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["num_heads", "h_cycles", "l_cycles"])
def test_settings_that_shapes_do_not_determine_must_be_given(tmp_path: Path, key: str) -> None:
    with pytest.raises(BadCheckpoint, match=rf"(?i)'{key}' is not in .*brain\.json, .* Add it there, or give --"):
        HrmConfig.read(open_hrm(make_brain(tmp_path, without(key))).config)


def test_errors_about_upstreams_settings_name_their_file_and_their_keys(tmp_path: Path) -> None:
    """They named config.json and num_attention_heads, which upstream's users do not have."""
    path = write_brain(tmp_path, dialect="upstream", heads=5)
    with pytest.raises(BadCheckpoint, match=r"^/.*/all_config\.yaml: 'hidden_size' 32 .* 5 heads \('num_heads'\)"):
        HrmConfig.read(open_hrm(path).config)
    (tmp_path / "all_config.yaml").write_text(ARCH_YAML)
    with pytest.raises(BadCheckpoint, match=r"^/.*/all_config\.yaml has no context length \('seq_len'\)"):
        HrmConfig.read(open_hrm(path).config)
    with pytest.raises(BadCheckpoint, match=r"^/.*/all_config\.yaml has no 'halt_max_steps'"):
        HrmConfig.read(open_hrm(path).config, max_seq_len=9)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"hidden_size": 64}, r"'hidden_size' is 64, but the tensors' shapes say 32"),
        ({"h_layers": 3}, r"'H_layers' is 3, .* say 2"),
        ({"arch": {"L_layers": 1}}, r"brain\.json, arch: 'L_layers' is 1, .* say 2"),
        ({"use_moe": True}, r"'use_moe' is True, but the weights have no experts"),
        ({"pos_encodings": "learned"}, r"'pos_encodings' is 'learned', but .* holds no table of positions"),
        ({"num_heads": "four"}, r"brain\.json: 'num_heads' must be an integer above 0, got 'four'"),
        ({"h_cycles": 0}, r"'H_cycles' must be an integer above 0"),
        ({"l_cycles": True}, r"'L_cycles' must be an integer above 0"),
        ({"arch": 7}, r"brain\.json: 'arch' must be an object, got 7"),
    ],
)
def test_what_contradicts_the_shapes_or_is_malformed_is_named(
    tmp_path: Path, told: dict[str, object], message: str
) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        open_hrm(make_brain(tmp_path, {**ARCH, **told}))


def test_experts_that_contradict_the_shapes_are_named(tmp_path: Path) -> None:
    weights = random_weights(experts=3)
    with pytest.raises(BadCheckpoint, match=r"'num_experts' is 8, .* say 3"):
        open_hrm(make_brain(tmp_path, {**ARCH, "num_experts": 8}, weights))
    with pytest.raises(BadCheckpoint, match="'use_moe' is False, but the weights have 3 experts"):
        open_hrm(make_brain(tmp_path, {**ARCH, "use_moe": False}, weights))


def test_a_table_of_positions_determines_the_context(tmp_path: Path) -> None:
    weights = random_weights(position_rows=40)
    assert open_hrm(make_brain(tmp_path, without("seq_len"), weights)).config["seq_len"] == 40
    with pytest.raises(BadCheckpoint, match=r"'seq_len' is 64, .* say 40"):
        open_hrm(make_brain(tmp_path, ARCH, weights))
    with pytest.raises(BadCheckpoint, match=r"'pos_encodings' is 'rope', but .* holds a table of positions"):
        open_hrm(make_brain(tmp_path, {**without("seq_len"), "pos_encodings": "rope"}, weights))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("inner.embed_tokens.embedding_weight", None, "holds no tensor .*, so it is not an HRM"),
        ("inner.embed_tokens.embedding_weight", torch.ones(9), "which is not a matrix"),
        ("inner.L_level.layers.0.mlp.gate_up_proj.weight", None, "holds no tensor"),
        ("inner.H_level.layers.3.mlp.gate_up_proj.weight", torch.ones(1), r"layers \[0, 1, 3\] of level H"),
        ("model.inner.H_init", torch.ones(32), "the same tensors twice"),
    ],
)
def test_weights_that_are_not_an_hrm_are_refused(
    tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    weights = {key: value for key, value in WEIGHTS.items() if key != name}
    if tensor is not None:
        weights[name] = tensor
    with pytest.raises(BadCheckpoint, match=message):
        open_hrm(make_brain(tmp_path, ARCH, weights))


@pytest.mark.parametrize("content", [b"", b"\x00" * 40, b"12345678{}"])
def test_damaged_safetensors_are_named(tmp_path: Path, content: bytes) -> None:
    path = make_brain(tmp_path)
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"actv1_student\.safetensors is damaged"):
        open_hrm(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arch: [", "is not valid YAML"),
        ("- 1", "should hold a table but holds a list"),
        ("arch: 3", "must be an object"),
        ("when: 2024-13-45", "is not valid YAML"),
        ("when: !!timestamp soon", "is not valid YAML"),
        ("flag: !!bool perhaps", "is not valid YAML"),
        (f"a: {'1' * 5000}", "is not valid YAML"),
        (f"arch: 0x{'f' * 5000}", "must be an object, got a value too large to show"),
        (f"arch: {{hidden_size: 0x{'f' * 5000}}}", "must be an integer above 0, got a value too large to show"),
        (ARCH_YAML + f"  rope_theta: 0x{'f' * 5000}", "'rope_theta' must be a number or a text"),
    ],
)
def test_malformed_settings_of_upstream_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = write_brain(tmp_path, dialect="upstream")
    (tmp_path / "all_config.yaml").write_text(text)
    with pytest.raises(BadCheckpoint, match=message):
        open_hrm(path)


@pytest.mark.parametrize("place", ["arch: *a6", "arch: {hidden_size: *a6}", ARCH_YAML + "  pos_encodings: *a6"])
def test_an_alias_that_stands_for_very_much_is_not_written_out(tmp_path: Path, place: str) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]" for i in range(7)]
    path = write_brain(tmp_path, dialect="upstream")
    (tmp_path / "all_config.yaml").write_text("\n".join([*levels, place]))
    with pytest.raises(BadCheckpoint) as caught:
        open_hrm(path)
    assert len(caught.value.message) < 1000


def test_directories_without_a_single_brain_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"holds neither actv1_student\.safetensors nor a checkpoint or step"):
        open_hrm(tmp_path / "empty")
    make_brain(tmp_path / "brains" / "a")
    make_brain(tmp_path / "brains" / "b")
    with pytest.raises(ModelNotFound, match=r"several brains \(a/actv1_student\.safetensors, b/"):
        open_hrm(tmp_path / "brains")


def test_a_file_that_is_gone_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="There is no file"):
        open_hrm(tmp_path / "actv1_student.safetensors")


# --- torch's archives -----------------------------------------------------------------------------------------------


class Custom:
    """Something that a trainer may have stored beside the weights."""

    def __init__(self) -> None:
        self.values = [1, 2]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('ran')",))


def test_shapes_are_read_without_running_what_a_file_names(tmp_path: Path) -> None:
    state = OrderedDict(a=torch.ones(2, 3), b=torch.nn.Parameter(torch.ones(())), c=torch.ones(4)[1:3])
    torch.save({"model": state, "extra": Custom(), "evil": Evil()}, tmp_path / "x.pt")
    assert tensor_shapes(tmp_path / "x.pt") == {"a": (2, 3), "b": (), "c": (2,)}


def test_archives_that_hold_no_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "none.pt")
    with pytest.raises(BadCheckpoint, match="holds no named tensors"):
        tensor_shapes(tmp_path / "none.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(BadCheckpoint, match="not one of tensors"):
        tensor_shapes(tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "cut.pt", "w") as archive:
        archive.writestr("cut/data.pkl", b"\x80\x02}q")
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        tensor_shapes(tmp_path / "cut.pt")
    with pytest.raises(BadCheckpoint, match="Cannot read"):
        tensor_shapes(tmp_path / "missing.pt")


def archive_of(path: Path, content: bytes, method: int = zipfile.ZIP_STORED) -> bytearray:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a/data.pkl", content)
    return bytearray(path.read_bytes())


@pytest.mark.parametrize("damage", ["encrypted", "deflate", "method"])
def test_archives_that_cannot_be_unpacked_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.pt"
    content = archive_of(path, b"\x80\x02}." * 100, zipfile.ZIP_DEFLATED)
    entry, listed = content.find(b"PK\x03\x04"), content.find(b"PK\x01\x02")
    if damage == "encrypted":
        content[entry + 6] |= 1
        content[listed + 8] |= 1
    elif damage == "method":
        content[entry + 8] = content[listed + 10] = 99
    else:
        start = entry + 30 + len("a/data.pkl")
        content[start : start + 2] = b"\xff\xff"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match="cannot be read as a file of tensors"):
        tensor_shapes(path)


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00K\x02K\x03\x86tR"


def test_a_state_that_a_file_sets_changes_neither_shapes_nor_tables(tmp_path: Path) -> None:
    """BUILD could put anything in the place of a shape, and of the table's own methods."""
    sizes = b"}X\x05\x00\x00\x00sizesX\x03\x00\x00\x00abcsb"
    archive_of(tmp_path / "shape.pt", b"\x80\x02}X\x01\x00\x00\x00a" + TENSOR + sizes + b"s.")
    assert tensor_shapes(tmp_path / "shape.pt") == {"a": (2, 3)}
    items = b"}X\x05\x00\x00\x00itemsNsb"
    table = b"ccollections\nOrderedDict\n)RX\x01\x00\x00\x00a" + TENSOR + b"s" + items
    archive_of(tmp_path / "table.pt", b"\x80\x02" + table + b".")
    assert tensor_shapes(tmp_path / "table.pt") == {"a": (2, 3)}


@pytest.mark.parametrize("size", [b"\x88", b"K\x01\x85", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\x00"])
def test_invalid_sizes_are_refused(tmp_path: Path, size: bytes) -> None:
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00" + size + b"\x85tR"
    archive_of(tmp_path / "x.pt", b"\x80\x02}X\x01\x00\x00\x00a" + tensor + b"s.")
    with pytest.raises(BadCheckpoint, match="a tensor's shape is malformed"):
        tensor_shapes(tmp_path / "x.pt")


def test_the_format_before_archives_is_refused(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(BadCheckpoint, match=r"older than 1\.6"):
        tensor_shapes(tmp_path / "old.pt")


def test_a_pickle_that_holds_code_opens_but_does_not_load(tmp_path: Path) -> None:
    write_json(tmp_path / "brain.json", ARCH)
    torch.save({"model": WEIGHTS, "evil": Evil()}, tmp_path / "actv1_student.pt")
    checkpoint = open_hrm(tmp_path / "actv1_student.pt")
    with pytest.raises(BadCheckpoint, match="not loaded for safety"):
        list(checkpoint.tensors())


# --- the brain that is a q-head on a Hugging Face model --------------------------------------------------------------


@pytest.mark.parametrize("given", [".", "starter_brain.json", "q_head.pt"])
def test_a_starter_names_its_base(tmp_path: Path, given: str) -> None:
    write_json(tmp_path / "starter_brain.json", {"base_model": "org/base"})
    torch.save({"weight": torch.ones(2)}, tmp_path / "q_head.pt")
    assert is_starter(tmp_path / given)
    assert not is_hrm(tmp_path)
    assert starter_base(tmp_path / given) == "org/base"


def test_a_base_beside_the_starter_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write_json(tmp_path / "starter_brain.json", {"Model_Name_or_Path": "base"})
    assert starter_base(tmp_path) == str(tmp_path / "base")


def test_a_starter_without_a_base_is_refused(tmp_path: Path) -> None:
    assert not is_starter(tmp_path)
    with pytest.raises(ModelNotFound, match=r"There is no starter_brain\.json"):
        starter_base(tmp_path)
    write_json(tmp_path / "starter_brain.json", {"base_model": 3})
    with pytest.raises(BadCheckpoint, match="does not name its base model"):
        starter_base(tmp_path)


@pytest.mark.parametrize("base", [".", "starter_brain.json", "q_head.pt", "inner"])
def test_a_base_that_is_itself_a_starter_is_refused(tmp_path: Path, base: str) -> None:
    """One that named its own directory was opened again and again."""
    (tmp_path / "inner").mkdir()
    for directory in (tmp_path, tmp_path / "inner"):
        write_json(directory / "starter_brain.json", {"base_model": base})
    (tmp_path / "q_head.pt").touch()
    with pytest.raises(BadCheckpoint, match=r"itself a starter\. Name a model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("base", ["w.bin", "w.pt", "w.pth", "step_7"])
def test_a_base_that_is_a_pickle_is_refused(tmp_path: Path, base: str) -> None:
    """A user who names a brain has not approved the pickle that the brain names."""
    write_json(tmp_path / "starter_brain.json", {"base_model": base})
    torch.save({"a": torch.ones(1)}, tmp_path / base)
    with pytest.raises(BadCheckpoint, match=r"a pickle, .*Convert it to safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("base", ["../base", "base", "{}/base", "~/base", "link"])
def test_a_base_outside_the_brain_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    (tmp_path / "brain").mkdir()
    (tmp_path / "brain" / "link").symlink_to(tmp_path / "base")
    write_json(tmp_path / "brain" / "starter_brain.json", {"base_model": base.format(tmp_path)})
    with pytest.raises(BadCheckpoint, match=r"outside the brain's directory\. Move it into"):
        open_checkpoint(tmp_path / "brain")
