from pathlib import Path

import pytest
import yaml

from ostro.config import EngineConfig
from ostro.errors import BadRequest
from ostro.server.fleet import fixed_specs, roots
from ostro.server.settings import ALIASES, PREFIX, REFUSED, Given, Merged, ServeSettings, read_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", *(PREFIX + name.upper() for name in ServeSettings.model_fields)):
        monkeypatch.delenv(name, raising=False)


def read(directory: Path, *, yaml_text: str | None = None, dotenv: str | None = None, **given: object) -> Merged:
    config = None
    if yaml_text is not None:
        config = directory / "ostro.yaml"
        config.write_text(yaml_text)
    if dotenv is not None:
        (directory / ".env").write_text(dotenv)
    flags = {name: Given(value, f"--{name}") for name, value in given.items()}
    return read_settings(flags, config=config, directory=directory)


def test_command_line_beats_environment_beats_dotenv_beats_yaml_beats_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "port: 1\nhost: yaml\npage_size: 1\nthreads: 1\n"
    dotenv = "OSTRO_PORT=2\nOSTRO_HOST=dotenv\nOSTRO_PAGE_SIZE=2\nUNRELATED=x\n"
    monkeypatch.setenv("OSTRO_PORT", "3")
    monkeypatch.setenv("OSTRO_HOST", "environment")
    merged = read(tmp_path, yaml_text=text, dotenv=dotenv, port="4")
    settings = merged.settings
    assert (settings.port, settings.host, settings.page_size, settings.threads) == (4, "environment", 2, 1)
    assert settings.request_timeout == 300.0
    assert merged.origins == {
        "port": "--port",
        "host": "OSTRO_HOST in the environment",
        "page_size": "OSTRO_PAGE_SIZE in .env",
        "threads": f"threads in {tmp_path / 'ostro.yaml'}",
    }


def test_engine_settings_are_the_engines_but_for_the_step_that_others_wait_for(tmp_path: Path) -> None:
    assert read(tmp_path).settings.engine() == EngineConfig(serving=True)
    settings = read(tmp_path, yaml_text="kv_memory: 1.5GiB\nprefix-caching: false\nmodel: ./m").settings
    assert settings.engine() == EngineConfig(kv_memory=3 << 29, prefix_caching=False, serving=True)
    assert settings.model == ("./m",)


_VALUES = {"device": "cpu", "local_dev": "true", "default_temperature": "0.5"}


@pytest.mark.parametrize(
    ("variable", "field", "value"),
    [(variable, field, _VALUES.get(field, "7")) for field in ALIASES for variable in ALIASES[field].env],
)
def test_variables_of_other_servers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, field: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    merged = read(tmp_path)
    assert merged.origins[field] == f"{variable} in the environment"
    others = {origin for name, origin in merged.origins.items() if name != field}
    assert others <= {f"implied by {variable} in the environment"}
    assert getattr(merged.settings, field) != ServeSettings.model_fields[field].default


def test_our_own_variable_beats_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1")
    monkeypatch.setenv("OSTRO_PORT", "2")
    assert read(tmp_path).settings.port == 2


@pytest.mark.parametrize(
    ("key", "field"), [(key, field) for field, names in ALIASES.items() for key in names.yaml if field != "device"]
)
def test_keys_of_other_servers_are_read_from_yaml(tmp_path: Path, key: str, field: str) -> None:
    value = "true" if field == "cors_credentials" else '"7"' if field in ("model", "tokenizer") else "1"
    merged = read(tmp_path, yaml_text=f"serve:\n  hrm:\n    {key}: {value}\n")
    assert merged.origins == {field: f"{key} in {tmp_path / 'ostro.yaml'}"}


def test_unknown_key_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"ostro\.yaml: max_batch_seq is no setting\. Did you mean max_batch_seqs\?$"):
        read(tmp_path, yaml_text="max_batch_seq: 3")
    with pytest.raises(BadRequest, match=r"zzz is no setting\. docs/configuration\.md lists them all\.$"):
        read(tmp_path, yaml_text="zzz: 3")


def test_misspelt_variable_is_an_error_and_a_foreign_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRO_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("OSTRO_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    read(tmp_path)
    monkeypatch.setenv("OSTRO_MAX_BATCH_SEQ", "3")
    with pytest.raises(BadRequest, match=r"Did you mean OSTRO_MAX_BATCH_SEQS\?"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("port: many", r"^port = 'many' \(port in .*\): Input should be a valid integer"),
        ("port: 70000", r"^port = 70000 .* less than or equal to 65535"),
        ("max_batch_seqs: 0", "greater than or equal to 1"),
        ("request_timeout: .nan", "finite"),
        ("kv_memory: lots", r"a memory size is written 512M or 2G"),
        ("device: tpu", "'auto', 'cpu' or 'cuda'"),
        ("dtype: int3", "'float32', 'float16' or 'bfloat16'"),
        ("gpu_memory_utilization: 1.5", "less than or equal to 1"),
        ("tensor_parallel_size: 2", "on one device"),
        ("enable_chunked_prefill: false", "always computed in chunks"),
        ("log_level: loud", "'debug', 'info', 'warning' or 'error'"),
        ("checkpoint_path: x", "checkpoint_path cannot be honoured: Levanter"),
        ("port: 1\nserve: {port: 2}", "port says again what port in .* has said"),
        ("model: a\nhf_checkpoint: b", "hf_checkpoint says again what model in"),
        ("- 1", "must hold settings"),
        ("a: [", "not valid YAML"),
        ("enable_cors: true\ncors_credentials: true", "needs origins by name"),
        ("api_key: sch\u00f6n", "plain ASCII"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint) as error:
        read(tmp_path, yaml_text=text)
    assert "\n" not in str(error.value)


def test_missing_config_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"Cannot read the config file .*nowhere\.yaml: No such file"):
        read_settings({}, config=tmp_path / "nowhere.yaml", directory=tmp_path)


def test_port_that_kubernetes_made_up_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(BadRequest, match="enableServiceLinks: false"):
        read(tmp_path)


def test_refused_key_is_never_shown(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as error:
        read(tmp_path, yaml_text="api_key: {top: secret}")
    assert "secret" not in str(error.value)


def test_keys_come_separated_by_commas_as_a_list_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("d\n")
    settings = read(tmp_path, yaml_text=f"api_key_file: {tmp_path / 'keys'}", api_key="a, b,,c").settings
    assert len(settings.keyring().keys) == 4
    assert len(read(tmp_path, yaml_text="api_key: [a, b]").settings.keyring().keys) == 2


def test_printed_config_is_yaml_that_means_the_same_and_shows_no_secret(tmp_path: Path) -> None:
    merged = read(tmp_path, yaml_text="cors_origins: [a, b]\nkv_memory: 2G", api_key="hush", host="::1")
    text = merged.describe()
    assert "hush" not in text
    values = yaml.safe_load(text)
    assert values.pop("api_key") == ["***"]
    assert (values["cors_origins"], values["kv_memory"], values["host"]) == (["a", "b"], 2 << 30, "::1")
    assert list(values) == [name for name in ServeSettings.model_fields if name != "api_key"]
    assert any(line.startswith("host:") and line.endswith("# --host") for line in text.splitlines())
    assert any(line.startswith("port:") and line.endswith("# default") for line in text.splitlines())
    again = read(tmp_path, yaml_text=yaml.safe_dump(values), api_key="hush")
    assert again.settings == merged.settings


def test_gate_lets_in_twice_what_the_engine_runs_unless_told(tmp_path: Path) -> None:
    assert read(tmp_path, yaml_text="max_batch_size: 5").settings.gate().concurrent == 10
    assert read(tmp_path, max_concurrent_requests="3").settings.gate().concurrent == 3


def test_every_setting_and_alias_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    names = set(ServeSettings.model_fields) | {name.replace("_", "-") for name in REFUSED}
    for each in ALIASES.values():
        names |= {*each.flags, *each.env, *each.yaml}
    assert {name for name in names if f"`{name}`" not in text and f"`--{name}`" not in text} == set()


@pytest.mark.parametrize("value", ["", " , "])
def test_key_that_is_empty_does_not_open_the_server(tmp_path: Path, value: str) -> None:
    """`--api-key "$KEY"` without a KEY served everybody."""
    with pytest.raises(BadRequest, match=r"api_key \(--api_key\) holds no key"):
        read(tmp_path, api_key=value)
    with pytest.raises(BadRequest, match="holds no key"):
        read(tmp_path, yaml_text=f"admin_key: '{value}'")
    assert read(tmp_path, yaml_text="api_key: []").settings.api_key == ()


def test_config_file_in_the_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was let pass, and nothing read it."""
    monkeypatch.setenv("OSTRO_CONFIG", "ostro.yaml")
    with pytest.raises(BadRequest, match="--config"):
        read(tmp_path)


def test_what_a_setting_implies_gives_way_to_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCS_BUCKET", "my-models")
    monkeypatch.setenv("MAX_CACHED_MODELS", "5")
    merged = read(tmp_path)
    assert (merged.settings.port, merged.settings.max_models) == (8080, 5)
    assert merged.origins["port"] == "implied by GCS_BUCKET in the environment"
    monkeypatch.setenv("LOCAL_DEV", "false")
    assert read(tmp_path).settings.device == "auto"


def test_models_come_from_references_names_and_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCS_BUCKET", "b")
    text = "model: [org/one, tiny=./tiny]\nmodels: ./models\nmodel_settings: {tiny: {max_seq_len: 7, pinned: true}}"
    settings = read(tmp_path, yaml_text=text).settings
    one, tiny = fixed_specs(settings)
    assert (one.name, one.config.model, one.pinned, one.named) == ("org/one", "org/one", False, False)
    assert (tiny.name, tiny.config.model, tiny.config.max_seq_len, tiny.pinned) == ("tiny", "./tiny", 7, True)
    assert roots(settings) == ("./models", "gs://b/models/")


def test_a_server_of_one_model_keeps_it_and_one_of_roots_has_no_model_of_its_own(tmp_path: Path) -> None:
    [only] = fixed_specs(read(tmp_path).settings)
    assert (only.config.model, only.pinned) == (None, True)
    assert fixed_specs(read(tmp_path, yaml_text="models: ./models").settings) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [a=./x, a=./y]", "Two models are called 'a'"),
        ("models: ./m\nlora: x=./y", "needs a model to sit on"),
        ("lora: ./y", "NAME=DIRECTORY"),
        ("model: a=./x\nmodel_settings: {a: {colour: 1}}", "colour is no setting of a model"),
    ],
)
def test_models_that_make_no_sense_are_refused(tmp_path: Path, text: str, words: str) -> None:
    settings = read(tmp_path, yaml_text=text).settings
    with pytest.raises(BadRequest, match=words):
        fixed_specs(settings)
