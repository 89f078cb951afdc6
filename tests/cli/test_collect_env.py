"""ostro collect-env: what a report needs, and nothing that must stay private."""

from pathlib import Path

import pytest

from ostro.cli import main
from ostro.cli.collect_env import shown_variables
from ostro.system.machine import cpu_model, vector_extensions
from ostro.version import __version__


def test_a_report_names_versions_processors_and_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRO_PORT", "9000")
    monkeypatch.setenv("OSTRO_API_KEY", "sk-private")
    assert main(["collect-env"]) == 0
    told, complaint = capsys.readouterr()
    assert complaint == ""
    titles = [line for line in told.splitlines() if not line.startswith(" ")]
    assert titles == ["ostro:", "system:", "processors:", "packages:", "variables:"]
    for row in (
        f"version: {__version__}",
        "native core: ",
        "threads: ",
        "huge pages: ",
        "python: 3.",
        "gpus: ",
        "numpy: ",
        "OSTRO_PORT: 9000",
    ):
        assert f"\n  {row}" in told
    assert "\n  OSTRO_API_KEY: ***\n" in told
    assert "sk-private" not in told
    assert "pytest" not in told.partition("packages:")[2].partition("variables:")[0]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("OSTRO_ADMIN_KEY", "private", "***"),
        ("OSTRO_COMPARE_KEY_A", "private", "***"),
        ("OSTRO_SOME_TOKEN", "private", "***"),
        ("OSTRO_MAX_BATCH_TOKENS", "256", "256"),
        ("OSTRO_OTLP_ENDPOINT", "http://me:private@host:4318/v1", "http://***@host:4318/v1"),
        ("OSTRO_PREFILL_URL", "http://host:8001/?token=private", "http://host:8001/?***"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
    ],
)
def test_secrets_in_variables_are_hidden(name: str, value: str, shown: str) -> None:
    assert shown_variables({name: value}) == {name: shown}


def test_variables_of_other_programs_are_left_out() -> None:
    assert shown_variables({"AWS_SECRET_ACCESS_KEY": "private", "HF_TOKEN": "private", "PATH": "/bin"}) == {}


def test_the_home_directory_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert shown_variables({"OSTRO_CACHE": "/home/ada/models"}) == {"OSTRO_CACHE": "~/models"}


@pytest.mark.parametrize(
    ("text", "model", "extensions"),
    [
        ("model name\t: A CPU\nflags\t\t: fpu smep avx2 fma amx_int8\n", "A CPU", ["amx_int8", "avx2", "fma"]),
        ("Features\t: fp asimd i8mm crc32\n", None, ["asimd", "i8mm"]),
        ("", None, []),
    ],
)
def test_the_cpu_is_described_as_the_kernel_does(
    text: str, model: str | None, extensions: list[str], tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert (cpu_model(tmp_path / "cpuinfo"), vector_extensions(tmp_path / "cpuinfo")) == (model, extensions)
