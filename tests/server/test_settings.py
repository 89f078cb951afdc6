import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from checkout import ROOT

from ostro.backends.planning import plan
from ostro.config import PREFIX, EngineConfig
from ostro.errors import BadRequest
from ostro.server.models.build import build_models, fixed_specs, roots
from ostro.server.settings import ALIASES, Given, Merged, ServeSettings, check_environment, read_settings
from ostro.system.machine import free_memory
from ostro.system.mesh_hosts import ADDRESS, COUNT, NUMBER


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", *(PREFIX + name.upper() for name in ServeSettings.model_fields)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def read(directory: Path, *, yaml_text: str | None = None, dotenv: str | None = None, **given: object) -> Merged:
    config = None
    if yaml_text is not None:
        config = directory / "ostro.yaml"
        config.write_text(yaml_text)
    if dotenv is not None:
        (directory / ".env").write_text(dotenv)
    flags = {name: Given(value, f"--{name}") for name, value in given.items()}
    return read_settings(flags, config=config, directory=directory)


def test_an_unquoted_off_in_yaml_is_the_word(tmp_path: Path) -> None:
    merged = read(tmp_path, yaml_text="speculative: off\nkernel-choices: off\nprefix_caching: off\n")
    engine = merged.settings.engine()
    assert (engine.speculative, engine.kernel_choices, engine.prefix_caching) == ("off", "off", False)


def test_command_line_beats_environment_beats_dotenv_beats_yaml_beats_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "port: 1\nhost: yaml\npage_size: 1\nthreads: 1\n"
    dotenv = "OSTRO_PORT=2\nOSTRO_HOST=dotenv\nOSTRO_PAGE_SIZE=2\nUNRELATED=x\n"
    monkeypatch.setenv("OSTRO_PORT", "3")
    monkeypatch.setenv("OSTRO_HOST", "environment")
    merged = read(tmp_path, yaml_text=text, dotenv=dotenv, port="4")
    settings = merged.settings
    assert (settings.port, settings.host) == (4, "environment")
    assert (settings.engine().page_size, settings.engine().threads) == (2, 1)
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


_VALUES = {
    "backend": "torch",
    "device": "cpu",
    "dtype": "bf16",
    "local_dev": "true",
    "default_temperature": "0.5",
    "gpu_memory_utilization": "0.5",
    "otlp_endpoint": "http://collector",
}


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        ("{}", False),
        ("cors_origins: https://page.example", True),
        ("cors_origins: []", False),
        ("cors_origins: https://page.example\nenable_cors: false", False),
    ],
)
def test_naming_origins_turns_cors_on(tmp_path: Path, text: str, enabled: bool) -> None:
    """They were taken, and nothing came of it."""
    assert read(tmp_path, yaml_text=text).settings.enable_cors is enabled


def test_credentials_alone_ask_for_the_origins_that_they_need(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="needs origins by name"):
        read(tmp_path, yaml_text="allow_credentials: true")
    origins = "cors_origins: https://page.example"
    assert read(tmp_path, yaml_text=f"allow_credentials: true\n{origins}").settings.enable_cors
    assert read(tmp_path, yaml_text=origins, dotenv="OSTRO_ALLOW_CREDENTIALS=true").settings.cors_credentials


@pytest.mark.parametrize("level", ["INFO", "Warning", "debug"])
def test_a_log_level_is_taken_in_any_case(tmp_path: Path, level: str) -> None:
    assert read(tmp_path, log_level=level).settings.log_level == level.lower()


def test_warn_is_a_log_level(tmp_path: Path) -> None:
    assert read(tmp_path, log_level="WARN").settings.log_level == "warning"


@pytest.mark.parametrize(
    ("given", "computes_in"),
    [
        ("bf16", "bfloat16"),
        ("half", "float16"),
        ("p=f32,c=bfloat16,o=f32", "bfloat16"),
        ("params=f32,compute=f16", "float16"),
    ],
)
def test_a_dtype_has_short_names_and_may_be_a_policy(tmp_path: Path, given: str, computes_in: str) -> None:
    assert read(tmp_path, dtype=given).settings.engine().dtype == computes_in


def test_running_tokens_bound_the_kv_cache_and_not_a_step(tmp_path: Path) -> None:
    """They bounded the tokens of one step."""
    settings = read(tmp_path, max_running_tokens="2048", pages_per_seq="8", cuda_graph_max_bs="4").settings
    expected = EngineConfig(serving=True, max_running_tokens=2048, pages_per_seq=8, cuda_graph_max_bs=4)
    assert settings.engine() == expected
    planned = plan(None, replace(settings.engine(), device="cpu"), memory=16 << 30)
    assert (planned.num_pages, planned.max_seq_len) == (2048 // 16, 8 * 16)


@pytest.mark.parametrize(
    ("variable", "field", "value"),
    [
        (variable, field, _VALUES.get(field, "7"))
        for field, names in ALIASES.items()
        for variable in names.env
        if field != "cors_credentials"
    ],
)
def test_other_variables_are_read(
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


def test_two_of_our_variables_for_one_setting_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_MODEL", "./one")
    monkeypatch.setenv("OSTRO_MODEL_PATH", "./other")
    with pytest.raises(BadRequest, match=r"^OSTRO_MODEL_PATH in the environment sets what OSTRO_MODEL .* Keep one"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("key", "field"), [(key, field) for field, names in ALIASES.items() for key in names.also if field != "device"]
)
def test_keys_of_other_servers_are_read_from_yaml(tmp_path: Path, key: str, field: str) -> None:
    texts = dict.fromkeys(("model", "tokenizer", "levanter_config", "served_model_name"), '"7"')
    value = {"backend": "torch", "cors_credentials": "false", "otlp_endpoint": "http://collector"} | texts
    merged = read(tmp_path, yaml_text=f"serve:\n  hrm:\n    {key}: {value.get(field, '1')}\n")
    assert merged.origins == {field: f"{key} in {tmp_path / 'ostro.yaml'}"}


def test_unknown_key_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(
        BadRequest, match=r"ostro\.yaml: max_batch_seq is not a setting\. Did you mean max_batch_seqs\?$"
    ):
        read(tmp_path, yaml_text="max_batch_seq: 3")
    with pytest.raises(BadRequest, match=r"zzz is not a setting\. docs/configuration\.md lists them all\.$"):
        read(tmp_path, yaml_text="zzz: 3")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("OSTRO_MAX_BATCH_SEQ", "Did you mean OSTRO_MAX_BATCH_SEQS?"),
        ("OSTRO_CAHCE", "Did you mean OSTRO_CACHE?"),
        ("OSTRO_WHATEVER", "Unset it; docs/configuration.md lists them all."),
    ],
)
def test_a_variable_of_ours_that_is_not_a_setting_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cure: str
) -> None:
    """Those unlike any setting were ignored, and so were all in a .env file."""
    with pytest.raises(BadRequest, match=f"^{name} in .env is not a setting. {re.escape(cure)}$"):
        read(tmp_path, dotenv=f"{name}=3")
    monkeypatch.setenv(name, "3")
    with pytest.raises(BadRequest, match=f"^{name} in the environment is not a setting. {re.escape(cure)}$"):
        read(tmp_path)


@pytest.mark.parametrize("service", ["OSTRO", "OSTRO_RAY_HEAD_SVC", "OSTRO_GPU"])
def test_variables_that_kubernetes_sets_for_a_service_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    for end in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(f"{service}_{end}", "10.0.0.1")
    assert read(tmp_path).origins == {}


def test_variables_that_are_read_elsewhere_are_no_mistakes() -> None:
    """They are found where the project reads them: as words in quotes, and in shells and compose files as ${NAME}."""
    places = [path for place in ("src", "bench", "scripts", "tests/support") for path in (ROOT / place).rglob("*")]
    files = [path for path in (*places, *ROOT.glob("compose*.yaml")) if path.suffix in (".py", ".sh", ".yaml")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    found = set(re.findall(r"""(?:["'*]|\$\{)(OSTRO_[A-Z_]+[A-Z])\b""", text))
    assert found >= {"OSTRO_CACHE", "OSTRO_FAULTS", "OSTRO_VENV", "OSTRO_PUBLISHED_PORT", "OSTRO_BENCH_BEGAN"}
    check_environment(found | {"OSTRO_COMPARE_KEY_A", "OSTRO_RAY_REPLICAS"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("port: many", r"^port = 'many' \(port in .*\): Input should be a valid integer"),
        ("port: 70000", r"^port = 70000 .* less than or equal to 65535"),
        ("max_batch_seqs: 0", "greater than or equal to 1"),
        ("request_timeout: .nan", "finite"),
        ("kv_memory: lots", r"a memory size is written 512M or 2G"),
        ("device: npu", "'auto', 'cpu', 'cuda', 'tpu' or 'mps'"),
        ("dtype: int3", "'float32', 'float16' or 'bfloat16'"),
        ("gpu_memory_utilization: 1.5", "less than or equal to 1"),
        ("tensor_parallel_size: 0", "greater than or equal to 1"),
        ("tensor_parallel: all", r"^tensor_parallel = 'all' \(.*\): write a number such as 2, or auto\.$"),
        ("enable_chunked_prefill: false", "always computed in chunks"),
        ("log_level: loud", "'debug', 'info', 'warning' or 'error'"),
        ("checkpoint_path: x\nhf_checkpoint: y", "exclude each other"),
        ("port: 1\nserve: {port: 2}", "port sets what port in .* has already set"),
        ("model: a\nhf_checkpoint: b", "hf_checkpoint sets what model in"),
        ("- 1", "must hold settings"),
        ("a: [", "not valid YAML"),
        ("enable_cors: true\ncors_credentials: true", "needs origins by name"),
        ("models: ./m\nany_model_name: true", "any_model_name is for single-model servers"),
        ("api_key: sch\u00f6n", "plain ASCII"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint) as error:
        read(tmp_path, yaml_text=text)
    assert "\n" not in str(error.value)


def test_missing_config_file_is_reported(tmp_path: Path) -> None:
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


def test_gate_admits_twice_what_the_engine_runs_by_default(tmp_path: Path) -> None:
    assert read(tmp_path, yaml_text="max_batch_size: 5").settings.gate().concurrent == 10
    assert read(tmp_path, max_concurrent_requests="3").settings.gate().concurrent == 3


@pytest.mark.parametrize("value", ["", " , "])
def test_key_that_is_empty_does_not_open_the_server(tmp_path: Path, value: str) -> None:
    """`--api-key "$KEY"` without a KEY served everybody."""
    with pytest.raises(BadRequest, match=r"api_key \(--api_key\) holds no key"):
        read(tmp_path, api_key=value)
    with pytest.raises(BadRequest, match="holds no key"):
        read(tmp_path, yaml_text=f"admin_key: '{value}'")
    assert read(tmp_path, yaml_text="api_key: []").settings.api_key == ()


def test_config_file_may_be_named_in_the_environment_or_dotenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers that have no command line of ours; a file that --config names takes its place."""
    for port in (9001, 9002):
        (tmp_path / f"{port}.yaml").write_text(f"port: {port}")
    assert read(tmp_path, dotenv=f"OSTRO_CONFIG={tmp_path / '9002.yaml'}").settings.port == 9002
    monkeypatch.setenv("OSTRO_CONFIG", str(tmp_path / "9001.yaml"))
    assert read(tmp_path).settings.port == 9001
    assert read(tmp_path, yaml_text="port: 9003").settings.port == 9003
    monkeypatch.setenv("OSTRO_CONFIG", "nowhere.yaml")
    with pytest.raises(BadRequest, match=r"Cannot read the config file nowhere\.yaml"):
        read(tmp_path)


AIOS_YAML = "brains: {dir: x}\nweb: {port: 1}\nserve:\n  hrm: {port: 9100, max_batch_size: 3}\n  other: {a: 1}\n"


def write_found(directory: Path, name: str, text: str) -> Path:
    (directory / "config").mkdir(exist_ok=True)
    (directory / "config" / name).write_text(text)
    return directory / "config" / name


def test_settings_are_picked_up_where_aios_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_found(tmp_path, "default.yaml", AIOS_YAML)
    merged = read(tmp_path)
    assert (merged.settings.port, merged.settings.engine().max_batch_seqs) == (9100, 3)
    assert merged.origins["port"] == f"port in {path}"
    assert merged.notes == (f"settings come from {path}, its section serve.hrm; ignored: brains, web, serve.other.",)
    monkeypatch.setenv("OSTRO_PORT", "9101")
    assert read(tmp_path).settings.port == 9101
    assert read(tmp_path, port=9102).settings.port == 9102


def test_a_config_file_that_is_named_wins_over_the_one_that_is_found(tmp_path: Path) -> None:
    write_found(tmp_path, "default.yaml", AIOS_YAML)
    merged = read(tmp_path, yaml_text="host: 127.0.0.2")
    assert (merged.settings.port, merged.settings.host, merged.notes) == (8000, "127.0.0.2", ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [a, b]", "it has no section serve.hrm or ostro."),
        ("a: !include b", "could not determine a constructor"),
        ("- 1", "it holds no sections."),
    ],
)
def test_another_programs_file_in_that_place_is_reported_and_left_alone(tmp_path: Path, text: str, words: str) -> None:
    path = write_found(tmp_path, "default.yaml", text)
    merged = read(tmp_path)
    [note] = merged.notes
    assert note.startswith(f"{path} is not used: ")
    assert words in note
    assert merged.settings.port == 8000


def test_a_wrong_setting_in_a_found_file_is_an_error(tmp_path: Path) -> None:
    write_found(tmp_path, "default.yaml", "serve: {hrm: {prot: 1}}")
    with pytest.raises(BadRequest, match=r"default\.yaml: prot is not a setting\. Did you mean port\?"):
        read(tmp_path)


def test_a_logging_config_is_picked_up_unless_its_code_is_not_installed(tmp_path: Path) -> None:
    path = write_found(tmp_path, "logging.yaml", "version: 1\nhandlers: {a: {class: logging.StreamHandler}}\n")
    merged = read(tmp_path)
    assert merged.settings.logging_config == path
    assert merged.notes == (f"logging is configured by {path}.",)
    write_found(tmp_path, "logging.yaml", "version: 1\nhandlers: {a: {class: nowhere_at_all.Handler}}\n")
    merged = read(tmp_path)
    assert merged.settings.logging_config is None
    assert merged.notes == (f"{path} is not used: it names nowhere_at_all.Handler, which is not installed.",)


def test_sections_of_other_programs_in_a_named_file_are_ignored_with_a_line(tmp_path: Path) -> None:
    merged = read(tmp_path, yaml_text=AIOS_YAML.replace("  other: {a: 1}\n", ""))
    assert merged.settings.port == 9100
    [note] = merged.notes
    assert note.endswith("sections of other programs are ignored: brains, web.")
    with pytest.raises(BadRequest, match="Did you mean model_settings"):
        read(tmp_path, yaml_text="serve: {port: 1}\nmodel_setings: {a: {pinned: true}}")


def test_what_a_setting_implies_gives_way_to_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCS_BUCKET", "my-models")
    monkeypatch.setenv("MAX_CACHED_MODELS", "5")
    merged = read(tmp_path)
    assert (merged.settings.port, merged.settings.max_models) == (8080, 5)
    assert merged.origins["port"] == "implied by GCS_BUCKET in the environment"
    monkeypatch.setenv("LOCAL_DEV", "false")
    assert read(tmp_path).settings.engine().device == "auto"


def test_models_come_from_references_names_and_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCS_BUCKET", "b")
    text = "model: [org/one, tiny=./tiny]\nmodels: ./models\nmodel_settings: {tiny: {max_seq_len: 7, pinned: true}}"
    settings = read(tmp_path, yaml_text=text).settings
    one, tiny = fixed_specs(settings)
    assert (one.name, one.config.model, one.pinned) == ("org/one", "org/one", False)
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
        ("models: ./m\nlora: x=./y", "needs a base model"),
        ("lora: ./y", "NAME=DIRECTORY"),
        ("model: [a=./x, b=./y]\nserved_model_name: b", "'b' means the first model"),
        ("model: [a=./x, default=./y]", "'default' means the first model"),
        ("models: ./m\nserved_model_name: b", "served_model_name is for the first model that was named, and none was"),
        ("model: a=./x\nlora: gpt=./y\nserved_model_name: [one, gpt]", "'gpt' means the first model"),
        ("model: [a=./x, b=./y]\nmodel_alias: b=a", "model_alias gives the name 'b' to 'a', but another model has it"),
        ("model: a=./x\nmodel_alias: default=a", "the name 'default' to 'a', but another model has it"),
        ("model: [a=./x, b=./y]\nmodel_alias: [gpt=a, gpt=b]", "the name 'gpt' to 'a', but another model has it"),
        ("model: a=./x\nmodel_alias: gpt", "model_alias is 'gpt'. Write it as NAME=MODEL"),
        ("model: a=./x\nmodel_alias: gpt=b", "model_alias names 'b', .* Known models: a, default"),
        ("model: [a=./x, tiny=./y]\npin: tinny", "pin names 'tinny', .* Known models: a, tiny"),
        ("model: a=./x\nmodel_settings: {b: {threads: 1}}", "model_settings names 'b', .* Known models: a"),
        ("model: a=./x\nlora: b=./y\nmodel_settings: {b: {threads: 1}}", "names 'b', .* Known models: a"),
    ],
)
def test_models_that_make_no_sense_are_refused(tmp_path: Path, text: str, words: str) -> None:
    settings = read(tmp_path, yaml_text=text).settings
    with pytest.raises(BadRequest, match=words):
        fixed_specs(settings)


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        ("{colour: 1}", "colour is not a per-model setting. The per-model settings are"),
        ("{max_seq_length: 1}", "max_seq_length is not a per-model setting. Did you mean max_seq_len"),
        ("{port: 1}", "port is not a per-model setting"),
        ("{max_seq_len: lots}", "max_seq_len = 'lots': Input should be a valid integer"),
        ("{kv_memory: lots}", "kv_memory = 'lots': a memory size is written 512M or 2G"),
        ("{kv_memory: 4000000000000000000}", "kv_memory must be at most"),
        ("{device: [cpu]}", r"device = \['cpu'\]: Input should be"),
        ("{pinned: 'no'}", "pinned = 'no': it must be true or false"),
        ("7", "Input should be a valid dictionary"),
    ],
)
def test_a_models_own_settings_are_checked_at_the_start(tmp_path: Path, own: str, complaint: str) -> None:
    """A wrong type took all models of a place away, without a word."""
    with pytest.raises(BadRequest, match=f"^model_settings .*'a'.*{complaint}") as error:
        read(tmp_path, yaml_text=f"models: ./m\nmodel_settings: {{a: {own}}}")
    assert "\n" not in str(error.value)


def test_a_models_own_settings_are_read_as_the_others_are(tmp_path: Path) -> None:
    own = "{kv_memory: 1G, max_seq_len: '4096', disable_cuda_graph: true, quantize: int8, pinned: true}"
    settings = read(tmp_path, yaml_text=f"model: [a=./x, b=./y]\nthreads: 3\nmodel_settings: {{a: {own}}}").settings
    mine, other = (spec.config for spec in fixed_specs(settings))
    assert (mine.kv_memory, mine.max_seq_len, mine.cuda_graphs, mine.quantize) == (1 << 30, 4096, False, "int8")
    assert (mine.threads, other.threads, other.kv_memory, other.cuda_graphs) == (3, 3, None, True)


def test_settings_match_another_spelling_unless_another_model_has_that_name(tmp_path: Path) -> None:
    """What was pinned as org-one was not, in silence."""
    text = (
        "model: [org/one=./x, org/two=./y, org-two=./z]\npin: org-one, org-two\nmodel_settings: {org-one: {threads: 1}}"
    )
    specs = fixed_specs(read(tmp_path, yaml_text=text).settings)
    assert [(spec.name, spec.pinned, spec.config.threads) for spec in specs] == [
        ("org/one", True, 1),
        ("org/two", False, "auto"),
        ("org-two", True, "auto"),
    ]


@pytest.mark.parametrize("name", ["french", "gpt", "default", "a"])
def test_a_model_is_pinned_by_any_of_its_names_and_by_those_of_its_adapters(tmp_path: Path, name: str) -> None:
    text = f"model: [a=./x, b=./y]\nserved_model_name: gpt\nlora: french=./z\npin: {name}"
    specs = fixed_specs(read(tmp_path, yaml_text=text).settings)
    assert [(spec.name, spec.pinned) for spec in specs] == [("a", True), ("b", False), ("french", False)]


def test_a_model_and_its_adapters_are_one_model(tmp_path: Path) -> None:
    """They counted as several: one that could not be loaded left a server that was ready for nothing."""
    settings = read(tmp_path, yaml_text="model: a=./x\nlora: french=./z").settings
    assert [(spec.name, spec.pinned) for spec in fixed_specs(settings)] == [("a", True), ("french", False)]
    assert not settings.has_several
    assert build_models(settings).only is not None


def test_a_bucket_implies_the_defaults_of_its_design_and_a_small_machine_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models at a time, on a small machine, too."""
    monkeypatch.setenv("GCS_BUCKET", "b")
    settings = read(tmp_path).settings
    assert (settings.port, settings.max_models, settings.request_timeout) == (8080, 2, 300)
    assert (settings.gate().concurrent, settings.default_max_tokens, settings.default_temperature) == (50, 512, 0.7)
    monkeypatch.setenv("LOCAL_DEV", "true")
    merged = read(tmp_path)
    assert (merged.settings.max_models, merged.settings.engine().quantize, merged.settings.port) == (1, "int8", 8080)
    assert merged.origins["max_models"] == "implied by LOCAL_DEV in the environment"


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_small_machine_with_an_explicit_device_keeps_its_weights_unquantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """8 bits were implied all the same, and refused: they are for CPUs."""
    monkeypatch.setenv("LOCAL_DEV", "true")
    engine = read(tmp_path, device=device).settings.engine()
    assert (engine.device, engine.quantize, engine.max_batch_seqs) == (device, "none", 8)
    settings = read(tmp_path).settings
    assert (settings.engine().device, settings.engine().quantize, settings.max_models) == ("cpu", "int8", 1)


def test_a_bucket_is_served_to_the_outside_in_a_container_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCS_BUCKET", "b")
    monkeypatch.setattr("ostro.server.settings.merging.in_container", lambda: True)
    merged = read(tmp_path)
    assert merged.settings.host == "0.0.0.0"
    assert merged.origins["host"] == "implied by GCS_BUCKET in the environment"
    assert read(tmp_path, host="127.0.0.1").settings.host == "127.0.0.1"
    monkeypatch.setattr("ostro.server.settings.merging.in_container", lambda: False)
    assert read(tmp_path).settings.host == "127.0.0.1"


def test_several_models_have_a_budget_by_default_and_one_has_none(tmp_path: Path) -> None:
    """Without one, no model went until the machine was full."""
    assert read(tmp_path, yaml_text="model: ./a").settings.memory_budget is None
    for text in ("models: ./m", "model: [a=./x, b=./y]", "gcs_bucket: b"):
        merged = read(tmp_path, yaml_text=f"{text}\ndevice: cpu")
        assert 0 < (merged.settings.memory_budget or 0) < free_memory()
        assert merged.origins["memory_budget"] == f"implied by {text.partition(':')[0]} in {tmp_path / 'ostro.yaml'}"
        assert merged.settings.gpu_memory_budget is None
    assert read(tmp_path, yaml_text="models: ./m\nmemory_budget: 3G").settings.memory_budget == 3 << 30


def test_keys_and_values_of_one_model_leave_most_of_a_budget(tmp_path: Path) -> None:
    """`ostro serve --memory-budget 3G` refused the default model: it counted 4 GiB for keys and values."""
    config = read(tmp_path, yaml_text="memory_budget: 3G\ndevice: cpu").settings.engine()
    assert config.kv_memory_limit == 3 << 28
    assert plan(None, config, memory=16 << 30).total_bytes < 3 << 30
    text = "memory_budget: 3G\ngpu_memory_budget: 8G\ndevice: cuda"
    assert read(tmp_path, yaml_text=text).settings.engine().kv_memory_limit == 2 << 30


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("models: ./m", 1),
        ("gcs_bucket: b", 1),
        ("models: ./m\nmax_models: 3", 3),
        ("gcs_bucket: b\nkv_memory: 2G", 2),
        ("models: ./m\ngpu_memory_budget: 8G", None),
        ("model: ./a", None),
    ],
)
def test_models_that_each_fill_a_gpu_are_loaded_one_at_a_time(tmp_path: Path, text: str, most: int | None) -> None:
    """The second one failed, for the first had taken nine tenths of the GPU."""
    merged = read(tmp_path, yaml_text=f"{text}\ndevice: cuda")
    assert merged.settings.max_models == most
    if text == "models: ./m":
        assert merged.origins["max_models"].endswith(", on a GPU without kv_memory")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"model": ("./a", "./b")}, "model"),
        ({"models": ("./shelf",)}, "models"),
        ({"gcs_bucket": "bucket"}, "gcs_bucket"),
        ({"model": "./a", "idle_timeout": 60}, "idle_timeout"),
    ],
)
def test_several_hosts_run_one_model_and_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], param: str
) -> None:
    """The other hosts would hear of no request to load another one, or to load this one again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shelf").mkdir()
    settings = read(tmp_path, backend="jax", device="cpu", **given).settings  # type: ignore[arg-type]
    build_models(settings)
    for name, value in {ADDRESS: "10.0.0.1:8476", COUNT: "2", NUMBER: "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadRequest, match=f"{param} .*several hosts") as caught:
        build_models(settings)
    assert caught.value.param == param
    build_models(read(tmp_path, backend="torch", device="cpu", **given).settings)  # type: ignore[arg-type]


def test_all_settings_that_name_too_many_models_for_several_hosts_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shelf").mkdir()
    settings = read(tmp_path, backend="jax", device="cpu", models=("./shelf",), model=("./a", "./b")).settings
    for name, value in {ADDRESS: "10.0.0.1:8476", COUNT: "2", NUMBER: "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadRequest, match=r"^models and model must not name more than one model"):
        build_models(settings)


def test_a_model_of_several_hosts_is_not_unloaded_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read(tmp_path, backend="jax", device="cpu", model="./a").settings
    assert build_models(settings).pool.limits.unloads
    for name, value in {ADDRESS: "10.0.0.1:8476", COUNT: "2", NUMBER: "0"}.items():
        monkeypatch.setenv(name, value)
    assert not build_models(settings).pool.limits.unloads


def test_half_of_the_variables_for_several_hosts_stop_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COUNT, "2")
    with pytest.raises(BadRequest, match="JAX_COORDINATOR_ADDRESS is not"):
        build_models(read(tmp_path, backend="jax", device="cpu", model="./a").settings)


def test_messages_name_the_flags_that_the_user_gave(tmp_path: Path) -> None:
    given = {"max_seq_len": Given(9, "--context-window"), "model": Given(("./m",), "--model-path")}
    merged = read_settings(given, directory=tmp_path)
    told = merged.in_users_words("max_seq_len is 9, but the model ./m knows 8. Lower --max-seq-len, or page_size.")
    assert (
        told == "max_seq_len (--context-window) is 9, but the model ./m knows 8. Lower --context-window, or page_size."
    )
    own = read_settings({"max_seq_len": Given(9, "--max-seq-len")}, directory=tmp_path)
    assert own.in_users_words("Lower max_seq_len: --max-seq-len 8.") == "Lower max_seq_len: --max-seq-len 8."
