"""A Levanter training YAML as `--config`: what serving needs of it is read, and the rest is named."""

from pathlib import Path

import pytest

from ostro.devices import DEVICE_KINDS
from ostro.errors import BadRequest
from ostro.server.settings import Given, Merged, read_settings

TRAINING = """
data: !include data/dolma.yaml
model:
  type: llama
  hidden_dim: 64
trainer:
  mp: p=f32,c=bfloat16
  seed: 7
  checkpointer: {save_interval: 30m}
tokenizer: ./tok
optimizer: {learning_rate: 3E-4}
checkpoint_path: runs/llama
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def read(directory: Path, text: str, **given: object) -> Merged:
    path = directory / "train.yaml"
    path.write_text(text)
    flags = {name: Given(value, f"--{name}") for name, value in given.items()}
    return read_settings(flags, config=path, directory=directory)


def test_model_tokenizer_and_checkpoint_are_read_and_the_rest_is_named_in_one_line(tmp_path: Path) -> None:
    merged = read(tmp_path, TRAINING, device="cuda")
    settings, path = merged.settings, tmp_path / "train.yaml"
    assert (settings.levanter_config, settings.references) == (str(path), ("runs/llama",))
    assert (settings.engine().tokenizer, settings.engine().dtype) == ("./tok", "bfloat16")
    assert merged.origins["dtype"] == f"trainer.mp in {path}"
    assert merged.notes == (
        f"{path} is a Levanter training config, of which serving uses model, trainer.mp, tokenizer, checkpoint_path; "
        "ignored: data, optimizer, trainer.seed, trainer.checkpointer.",
    )


def test_a_cpu_does_not_take_the_precision_of_a_gpu_and_says_so(tmp_path: Path) -> None:
    merged = read(tmp_path, TRAINING)
    assert merged.settings.engine().dtype == "auto"
    assert "trainer.mp" in merged.notes[-1]
    assert "does not run on a CPU" in merged.notes[-1]
    # What a person says is not taken out.
    assert read(tmp_path, TRAINING, dtype="bfloat16").settings.engine().dtype == "bfloat16"


@pytest.mark.parametrize(
    ("trainer", "key"),
    [
        ("{mesh: {axes: {data: -1, model: 4}}}", "trainer.mesh.axes.model"),
        ("{model_axis_size: 4}", "trainer.model_axis_size"),
        ("{model_axis_size: 2, mesh: {axes: {model: 4}}}", "trainer.mesh.axes.model"),
    ],
)
def test_the_models_axis_of_the_mesh_is_the_number_of_devices(tmp_path: Path, trainer: str, key: str) -> None:
    text = f"model: {{type: llama}}\ncheckpoint_path: runs/llama\ntrainer: {trainer}\n"
    merged = read(tmp_path, text, backend="jax")
    assert merged.settings.engine().tensor_parallel == 4
    assert merged.origins["tensor_parallel"] == f"{key} in {tmp_path / 'train.yaml'}"
    # What divides no model runs it on one device, and says so.
    merged = read(tmp_path, text, backend="native")
    assert merged.settings.engine().tensor_parallel == 1
    assert f"{key} in" in merged.notes[-1]
    assert "asks for 4 devices" in merged.notes[-1]


def test_an_axis_that_takes_all_devices_is_auto(tmp_path: Path) -> None:
    text = "trainer: {mesh: {axes: {model: -1}}}\nhf_checkpoint: org/name"
    assert read(tmp_path, text, backend="jax").settings.engine().tensor_parallel == "auto"


def test_unused_keys_inside_the_mesh_are_named(tmp_path: Path) -> None:
    """The mesh counted as used as a whole."""
    mesh = "{axes: {replica: 2, model: 1}, compute_mapping: {a: b}}"
    merged = read(tmp_path, f"trainer: {{mesh: {mesh}}}\nhf_checkpoint: org/name")
    assert merged.notes[0].endswith("ignored: trainer.mesh.axes.replica, trainer.mesh.compute_mapping.")


def test_a_temperature_in_the_training_config_is_the_default(tmp_path: Path) -> None:
    merged = read(tmp_path, f"{TRAINING}temperature: 0.3\n")
    assert merged.settings.default_temperature == 0.3


def test_max_new_tokens_of_a_sampling_config_is_a_default_rather_than_a_limit(tmp_path: Path) -> None:
    """As Levanter's sampler means it: requests that set no max_tokens get so many, and others may get more."""
    merged = read(tmp_path, f"{TRAINING}prompts: [Four score]\nmax_new_tokens: 48\n")
    assert (merged.settings.default_max_tokens, merged.settings.max_new_tokens) == (48, None)
    assert "checkpoint_path, max_new_tokens; ignored: data, optimizer, prompts," in merged.notes[0]
    (tmp_path / "serve.yaml").write_text("max_new_tokens: 48\n")
    assert read_settings({}, config=tmp_path / "serve.yaml", directory=tmp_path).settings.max_new_tokens == 48


@pytest.mark.parametrize("section", ["service", "engine"])
@pytest.mark.parametrize("text", [TRAINING, "hf_checkpoint: org/name\n"])
def test_the_engines_section_sets_what_its_flags_set(tmp_path: Path, section: str, text: str) -> None:
    keys = "max_seq_len: 512, max_seqs: 4, page_size: 32, hbm_utilization: 0.5, seed: 7"
    merged = read(tmp_path, f"{text}{section}: {{{keys}}}\n")
    engine = merged.settings.engine()
    assert (engine.max_seq_len, engine.max_batch_seqs, engine.page_size) == (512, 4, 32)
    assert (engine.gpu_memory_utilization, merged.settings.seed) == (0.5, 7)
    assert merged.origins["max_batch_seqs"] == f"{section}.max_seqs in {tmp_path / 'train.yaml'}"
    with pytest.raises(BadRequest, match=rf"{section}\.max_pages is not supported: write --max-running-tokens"):
        read(tmp_path, f"{text}{section}: {{max_pages: 4}}\n")
    with pytest.raises(BadRequest, match=rf"{section}\.max_seqs in .*sets what|sets what .*{section}\.max_seqs"):
        read(tmp_path, f"{text}{section}: {{max_seqs: 4}}\nmax_batch_seqs: 3\n")


def test_a_section_of_that_name_in_another_programs_file_is_its_own(tmp_path: Path) -> None:
    merged = read(tmp_path, "serve: {port: 9000}\nengine: {kind: x}\nservice: {name: y}\n")
    assert merged.settings.port == 9000
    assert merged.notes[0].endswith("sections of other programs are ignored: engine, service.")


def test_bfloat16_is_computed_on_a_cpu_by_jax_alone(tmp_path: Path) -> None:
    merged = read(tmp_path, TRAINING, backend="jax", device="cpu")
    engine = merged.settings.engine()
    assert (engine.dtype, len(merged.notes)) == ("bfloat16", 1)
    DEVICE_KINDS["cpu"].check(engine)
    with pytest.raises(BadRequest, match=r"bfloat16 does not run on a CPU\. Use float32, or --backend jax\."):
        DEVICE_KINDS["cpu"].check(read(tmp_path, TRAINING, dtype="bfloat16").settings.engine())


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("f32", "float32"),
        ("bfloat16", "bfloat16"),
        ("p=f32,c=bf16", "bfloat16"),
        ("params=float32, compute=float16, output=float32", "float16"),
    ],
)
def test_precision_is_what_it_computed_in(tmp_path: Path, policy: str, dtype: str) -> None:
    text = f"trainer: {{mp: '{policy}'}}\nhf_checkpoint: org/name"
    assert read(tmp_path, text, device="cuda").settings.engine().dtype == dtype


def test_precision_that_a_tpu_does_not_have_is_left_out_with_a_note(tmp_path: Path) -> None:
    merged = read(tmp_path, TRAINING.replace("c=bfloat16", "c=float16"), device="tpu")
    assert merged.settings.engine().dtype == "auto"
    assert "asks for float16, which does not run on a TPU" in merged.notes[-1]


def test_unknown_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"trainer\.mp = 'p=f32' names no precision"):
        read(tmp_path, "trainer: {mp: p=f32}\nhf_checkpoint: org/name")


@pytest.mark.parametrize(
    ("text", "tokenizer"),
    [("data: {tokenizer: org/tok, cache_dir: c}", "org/tok"), ("data: {tokenizer: a}\ntokenizer: b", "b")],
)
def test_tokenizer_of_the_data_is_second_choice(tmp_path: Path, text: str, tokenizer: str) -> None:
    merged = read(tmp_path, f"{text}\ntrainer: {{}}\nhf_checkpoint: org/name")
    assert merged.settings.engine().tokenizer == tokenizer


def test_checkpoint_of_the_hub_may_be_a_table_with_a_revision(tmp_path: Path) -> None:
    text = "trainer: {}\nhf_checkpoint: {model_name_or_path: org/name, revision: main}"
    assert read(tmp_path, text).settings.model == ("org/name@main",)


def test_settings_of_the_server_beside_those_of_training_hold(tmp_path: Path) -> None:
    merged = read(tmp_path, f"{TRAINING}port: 9000\nserve: {{max-batch-seqs: 3}}")
    assert (merged.settings.port, merged.settings.engine().max_batch_seqs) == (9000, 3)


def test_training_config_without_weights_is_refused_rather_than_another_model_served(tmp_path: Path) -> None:
    text = TRAINING.replace("checkpoint_path: runs/llama", "")
    with pytest.raises(BadRequest, match=r"names no weights\. Give --checkpoint-path or --hf-checkpoint"):
        read(tmp_path, text)
    assert read(tmp_path, text, checkpoint_path="runs/llama").settings.references == ("runs/llama",)


def test_tags_in_a_config_that_is_not_of_training_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="not valid YAML"):
        read(tmp_path, "port: !include port.yaml")
