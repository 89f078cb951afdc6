import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_directory import write_model
from object_stores import BUCKET, ObjectStore, running_store

from ostro.backends.tiers.page_file import PageFile, open_page_file
from ostro.cli import main
from ostro.sources.page_files import page_file_name
from ostro.sources.store import ModelStore


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A bucket with one model under two names."""
    directory = write_model(tmp_path_factory.mktemp("model"))
    with running_store("gs") as store:
        for path in directory.iterdir():
            for prefix in ("models/acme/tiny", "other/acme/tiny"):
                store.put(f"{prefix}/{path.name}", path.read_bytes())
        yield store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def level_as_before() -> Iterator[None]:
    """A pull sets our loggers' level for its process; here the process goes on."""
    logger = logging.getLogger("ostro")
    before = logger.level
    yield
    logger.setLevel(before)


REFERENCE = f"gs://{BUCKET}/models/acme/tiny"


def models(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(["models", *args])
    return status, *capsys.readouterr()


def test_a_model_is_pulled_listed_verified_and_removed(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    status, out, _ = models(capsys, "pull", REFERENCE)
    assert status == 0
    path = Path(out.strip())
    assert (path / "model.safetensors").is_file()
    status, out, _ = models(capsys, "list")
    header, row = out.splitlines()
    assert (status, header.split()) == (0, ["NAME", "SIZE", "LAST", "USE", "IN", "USE", "SOURCE"])
    assert row.startswith("acme/tiny  ")
    assert row.endswith(f"no      {REFERENCE}")
    assert models(capsys, "verify") == (0, f"{REFERENCE}: good\n", "")
    status, out, _ = models(capsys, "rm", "acme/tiny")
    assert (status, out.startswith(f"removed {REFERENCE}, ")) == (0, True)
    assert ModelStore().entries() == []


def test_the_list_can_be_read_by_programs(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert models(capsys, "list", "--json") == (0, "[]\n", "")
    path = Path(models(capsys, "pull", REFERENCE)[1].strip())
    name = page_file_name("acme/tiny", path)
    with ModelStore().hold(path):
        keep_pages(cache, name).close()
        status, out, _ = models(capsys, "list", "--json")
    model, pages = json.loads(out)
    assert status == 0
    assert model["last_use"] > 0
    assert model == {
        "name": "acme/tiny",
        "kind": "model",
        "size": next(each.size for each in ModelStore().entries()),
        "last_use": model["last_use"],
        "in_use": True,
        "source": REFERENCE,
        "variant": None,
        "path": str(path),
    }
    assert (pages["kind"], pages["name"]) == ("pages", f"pages/{name.removesuffix('.pages')}")


def test_a_damaged_model_is_reported_with_its_cure(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(models(capsys, "pull", REFERENCE)[1].strip()) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, out, _ = models(capsys, "verify", REFERENCE)
    assert status == 1
    assert "model.safetensors is damaged" in out
    assert "'ostro models rm acme/tiny', then pull it again" in out
    assert models(capsys, "rm", "acme/tiny")[0] == 0
    assert models(capsys, "pull", REFERENCE)[0] == 0
    assert models(capsys, "verify")[0] == 0


def test_a_model_in_use_is_shown_and_not_removed(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(models(capsys, "pull", REFERENCE)[1].strip())
    with ModelStore().hold(path):
        assert " yes     gs://" in models(capsys, "list")[1]
        status, _, err = models(capsys, "rm", "acme/tiny")
        assert (status, "is in use. Stop what serves it" in err) == (1, True)
    assert path.exists()


def keep_pages(cache: Path, name: str) -> PageFile:
    return open_page_file(cache / "pages", name, identity=b"a model", page_bytes=64, limit=1 << 20)


def test_kept_prefixes_are_listed_and_go_with_their_model(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    """They stayed where nobody saw them, up to 20 GB that reveal prompts."""
    path = Path(models(capsys, "pull", REFERENCE)[1].strip())
    name = page_file_name("acme/tiny", path)
    elsewhere = page_file_name("mine", cache / "elsewhere")
    keep_pages(cache, elsewhere).close()
    kept = keep_pages(cache, name)
    shown = f"pages/{name.removesuffix('.pages')}"
    rows = {row.split()[0]: row for row in models(capsys, "list")[1].splitlines()}
    assert rows[shown].endswith(f" yes     {path}")
    assert rows[f"pages/{elsewhere.removesuffix('.pages')}"].endswith(f" no      {cache / 'pages' / elsewhere}")
    status, _, err = models(capsys, "rm", shown)
    assert (status, "is in use. Stop what serves it" in err) == (1, True)
    kept.close()
    status, out, _ = models(capsys, "verify")
    assert (status, f"{shown}: not checked. " in out) == (0, True)
    status, out, _ = models(capsys, "rm", "acme/tiny")
    assert (status, f"removed {shown}, " in out) == (0, True)
    assert [each.name for each in (cache / "pages").iterdir()] == [elsewhere]
    assert models(capsys, "rm", f"pages/{elsewhere.removesuffix('.pages')}")[0] == 0
    assert list((cache / "pages").iterdir()) == []


def test_prefixes_of_a_model_that_is_one_file_go_with_its_directory(
    capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    (cache / "pypi" / "llm-tiny-1.0").mkdir(parents=True)
    (gguf := cache / "pypi" / "llm-tiny-1.0" / "tiny.gguf").write_bytes(bytes(5000))
    keep_pages(cache, page_file_name("tiny", gguf)).close()
    assert models(capsys, "rm", "llm-tiny")[0] == 0
    assert list((cache / "pages").iterdir()) == []


def test_one_name_of_two_models_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    other = f"gs://{BUCKET}/other/acme/tiny"
    for reference in (REFERENCE, other):
        models(capsys, "pull", reference)
    status, _, err = models(capsys, "rm", "acme/tiny", "none")
    assert status == 1
    assert f"Several models are called 'acme/tiny'. Give one of their sources: {REFERENCE}, {other}." in err
    assert "There is no model 'none' in the cache." in err
    assert models(capsys, "rm", other)[0] == 0
    assert [entry.reference for entry in ModelStore().entries()] == [REFERENCE]


def test_a_wheels_model_is_listed_and_said_to_be_unchecked(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    (cache / "pypi" / "llm-tiny-1.0").mkdir(parents=True)
    (cache / "pypi" / "llm-tiny-1.0" / "tiny.gguf").write_bytes(bytes(5000))
    assert "pypi:llm-tiny==1.0" in models(capsys, "list")[1]
    status, out, _ = models(capsys, "verify", "llm-tiny")
    assert (status, "not checked" in out) == (0, True)


@pytest.mark.parametrize(
    ("reference", "message", "wanted"),
    [
        (f"gs://{BUCKET}/models/acme/none", "There is nothing at gs://", 1),
        ("gs://models/../x", "is not a model reference", 1),
        (os.curdir, "is on this machine already", 2),
        ("one-word", "is not a model reference. Give a directory", 1),
    ],
)
def test_failed_pull_is_reported_in_one_line(
    reference: str, message: str, wanted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = models(capsys, "pull", reference)
    assert (status, out, err.count("\n")) == (wanted, "", 1)
    assert message in err


def test_help_says_that_the_hubs_cache_is_the_hubs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "--help"])
    assert "the Hub's own cache" in " ".join(capsys.readouterr().out.split())
