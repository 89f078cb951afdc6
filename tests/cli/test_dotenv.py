import os
from pathlib import Path

import pytest

from ostro.cli import main
from ostro.sources.cache import cache_root
from ostro.system.env_file import read_cache_variables


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was afterwards, whatever a test sets."""
    for name in ("OSTRO_CACHE", "LOCAL_MODEL_CACHE", "OSTRO_CACHE_LIMIT"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("name", ["OSTRO_CACHE", "LOCAL_MODEL_CACHE"])
def test_the_cache_may_be_named_in_dotenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It was not read, so models went where the environment or nobody had said."""
    (tmp_path / ".env").write_text(f"{name}={tmp_path / 'kept'}\nOSTRO_CACHE_LIMIT=5G\nOSTRO_PORT=9\n")
    monkeypatch.chdir(tmp_path)
    assert main(["models", "list"]) == 0
    assert cache_root() == tmp_path / "kept"
    assert (os.environ["OSTRO_CACHE_LIMIT"], os.environ.get("OSTRO_PORT")) == ("5G", None)


def test_the_environment_beats_dotenv_by_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("OSTRO_CACHE=there\nOSTRO_CACHE_LIMIT=5G\n")
    monkeypatch.setenv("LOCAL_MODEL_CACHE", "here")
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", "1G")
    read_cache_variables(tmp_path)
    assert (cache_root(), os.environ["OSTRO_CACHE_LIMIT"]) == (Path("here"), "1G")


def test_without_a_file_nothing_is_set(tmp_path: Path) -> None:
    before = dict(os.environ)
    read_cache_variables(tmp_path)
    assert dict(os.environ) == before
