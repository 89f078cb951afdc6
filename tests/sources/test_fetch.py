"""Models fetched from real stores behind a proxy that breaks things: each case ends in the right bytes or an error."""

import json
import os
import re
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from bucket_models import BLOCK, CONFIG, contents, model_files, models_in, weights
from fault_proxy import Fault, FaultProxy
from object_stores import BUCKET, ObjectStore, s3_client

from ostro.errors import BadRequest, DiskFull, DownloadFailed, ModelNotFound, Unsupported
from ostro.sources import base, gcs, partial, progress, s3
from ostro.sources import cache as cache_module
from ostro.sources.address import StoreAddress, parse_address
from ostro.sources.base import ObjectInfo
from ostro.sources.fetch import fetch_model
from ostro.sources.models import list_models
from ostro.sources.s3 import S3Source
from ostro.sources.store import ModelStore
from ostro.system.requirements import install_command
from ostro.weights import open_checkpoint

pytest_plugins = ["store_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

UNWANTED = {
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "README.md": b"words",
    "checkpoint-500/model.safetensors": b"old",
    "onnx/config.json": b"{}",
    ".hidden.json": b"{}",
}

# Where it is our own doing alone that counts.
ONE_STORE = pytest.mark.parametrize("store", ["gcs_store"], indirect=True)


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a store that stays silent: if a busy machine makes it look so even earlier, it ends in the same error."""
    for module in (gcs, s3):
        monkeypatch.setattr(module, "READ_SECONDS", 0.2)


def fetching_process(reference: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    program = f"""
import sys
from ostro.sources import partial
from ostro.sources.fetch import fetch_model
partial.BLOCK_BYTES = {BLOCK}
print(fetch_model(sys.argv[1], progress=False))
"""
    return subprocess.Popen(
        [sys.executable, "-c", program, reference],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )


def ranges_on_disk(cache: Path) -> set[tuple[str, int, int]]:
    """File name, start and end, of the one unfinished download."""
    [journal] = cache.glob("objects/*.partial/journal")
    lines = [json.loads(line) for line in journal.read_text().splitlines() if line.startswith("[")]
    return {(line[0], line[2], line[3]) for line in lines if len(line) == 4}


# --- what is fetched ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_model_arrives_with_the_files_that_are_read_and_no_others(
    store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path
) -> None:
    files = model_files()
    reference = store.put_model(prefix, files | UNWANTED)
    store.put(f"{prefix}-sibling/config.json", b"{}")
    path = fetch_model(reference, progress=False)
    assert contents(path) == files
    assert models_in(cache) == [path]
    assert not list((cache / "objects").glob("*.partial"))


@ONE_STORE
def test_a_trailing_slash_makes_no_other_model(store: ObjectStore, proxy: FaultProxy, prefix: str) -> None:
    reference = store.put_model(prefix, model_files())
    assert fetch_model(reference + "/", progress=False) == fetch_model(reference, progress=False)


@pytest.mark.full
def test_a_cached_model_needs_no_network(store: ObjectStore, proxy: FaultProxy, prefix: str) -> None:
    reference = store.put_model(prefix, model_files())
    path = fetch_model(reference, progress=False)
    proxy.close()
    assert fetch_model(reference, progress=False) == path


@ONE_STORE
def test_a_cached_model_with_a_missing_file_is_fetched_again(
    store: ObjectStore, proxy: FaultProxy, prefix: str
) -> None:
    reference = store.put_model(prefix, model_files())
    (fetch_model(reference, progress=False) / "tokenizer.json").unlink()
    assert contents(fetch_model(reference, progress=False)) == model_files()


@pytest.mark.full
def test_a_checkpoint_is_opened_by_its_address(store: ObjectStore, proxy: FaultProxy, prefix: str) -> None:
    reference = store.put_model(f"{prefix}/acme/tiny", model_files())
    checkpoint = open_checkpoint(reference, progress=False)
    assert (checkpoint.name, checkpoint.config["model_type"]) == ("acme/tiny", "llama")


@ONE_STORE
def test_one_gguf_file_of_several_is_fetched_alone(store: ObjectStore, proxy: FaultProxy, prefix: str) -> None:
    split_files = {"s-00001-of-00002.gguf": b"1", "s-00002-of-00002.gguf": b"2"}
    reference = store.put_model(prefix, {"a.gguf": b"A", "a.gguf.bak": b"-", "b.gguf": b"B"} | split_files)
    assert contents(fetch_model(f"{reference}/a.gguf", progress=False)) == {"a.gguf": b"A"}
    assert contents(fetch_model(f"{reference}/s-00001-of-00002.gguf", progress=False)) == split_files


@ONE_STORE
def test_the_log_reports_progress(
    store: ObjectStore,
    proxy: FaultProxy,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.0)
    reference = store.put_model(prefix, model_files())
    with caplog.at_level("INFO", logger="ostro"):
        fetch_model(reference, progress=False)
    first, *between, last = [record.getMessage() for record in caplog.records]
    assert first == f"fetching {reference}: 1 MB, of which 0 MB are already here"
    assert f"fetching {reference}: 1 of 1 MB" in between
    assert last.startswith(f"fetched {reference} in ")


@pytest.mark.full
@ONE_STORE
def test_a_terminal_is_shown_a_bar(store: ObjectStore, proxy: FaultProxy, prefix: str) -> None:
    reference = store.put_model(prefix, model_files())
    ours, theirs = os.openpty()
    termios.tcsetwinsize(ours, (24, 120))
    program = "import sys; from ostro.sources.fetch import fetch_model; fetch_model(sys.argv[1], progress=True)"
    subprocess.run([sys.executable, "-c", program, reference], stderr=theirs, check=True)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert f"{reference}: 100%" in shown


# --- faults ---------------------------------------------------------------------------------------------------------

PASSING = [
    Fault.TRUNCATED,
    Fault.STALLED,
    Fault.TRICKLED,
    Fault.RESET,
    Fault.STATUS_503,
    Fault.STATUS_429,
    Fault.FLIPPED,
]
# A listing, and of S3 the descriptions of objects: Google's listing has all that they tell.
LOOKS = [("gcs_store", "prefix="), ("s3_store", "prefix="), ("s3_store", "model.safetensors")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("store", "faults"),
    [
        ("gcs_store", PASSING),
        ("s3_store", PASSING),
        # Each alone: nothing that all of them together do not show, but it names the one.
        *(pytest.param("gcs_store", [fault], marks=pytest.mark.slow) for fault in PASSING),
    ],
    indirect=["store"],
    ids=lambda value: value if isinstance(value, str) else "+".join(fault.name for fault in value),
)
def test_faults_that_pass_end_in_the_right_model(
    store: ObjectStore, proxy: FaultProxy, prefix: str, faults: list[Fault]
) -> None:
    reference = store.put_model(prefix, model_files())
    for fault in faults:
        proxy.fail(fault, times=2, path="model.safetensors")
    assert contents(fetch_model(reference, progress=False)) == model_files()
    assert proxy.faults_left == 0


@pytest.mark.full
@pytest.mark.parametrize(("store", "path"), LOOKS, indirect=["store"])
def test_looks_that_fail_and_pass_end_in_the_right_model(
    store: ObjectStore, proxy: FaultProxy, prefix: str, path: str
) -> None:
    """Half a description of an object was a KeyError."""
    reference = store.put_model(prefix, model_files())
    for fault in (Fault.STATUS_503, Fault.STATUS_429, Fault.STALLED, Fault.TRUNCATED, Fault.RESET):
        proxy.fail(fault, path=path, of="look")
    assert contents(fetch_model(reference, progress=False)) == model_files()
    assert proxy.faults_left == 0


@pytest.mark.cases(2)
@pytest.mark.parametrize(("store", "path"), LOOKS, indirect=["store"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.STATUS_503, r"failed 2 times \(status 503\)"),
        (Fault.STALLED, r"failed 2 times \(no answer in time\)"),
        # Of half a listing the client of S3 makes a status of its own.
        (Fault.TRUNCATED, r"failed 2 times \(the (connection|answer) broke off|\(status 500\)"),
        (Fault.STATUS_403, r"refuses access"),
    ],
)
def test_looks_that_go_on_failing_are_an_error_with_its_reason(
    store: ObjectStore,
    proxy: FaultProxy,
    prefix: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fault: Fault,
    reason: str,
) -> None:
    monkeypatch.setattr(base, "ATTEMPTS", 2)
    if fault is Fault.STALLED:
        be_impatient(monkeypatch)
    reference = store.put_model(prefix, model_files())
    proxy.fail(fault, times=2, path=path, of="look")
    with pytest.raises(DownloadFailed, match=reason):
        fetch_model(reference, progress=False)
    assert models_in(cache) == []


@pytest.mark.full
def test_a_connection_that_only_trickles_is_given_up(
    store: ObjectStore, proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte came always in time, so the download never ended."""
    monkeypatch.setattr(base, "ATTEMPTS", 2)
    reference = store.put_model(prefix, model_files())
    proxy.always_fail(Fault.TRICKLED)
    with pytest.raises(DownloadFailed, match=r"failed 2 times \(only \d+ bytes arrived in \d seconds\)"):
        fetch_model(reference, progress=False)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.TRUNCATED, r"failed 6 times \((the connection broke off|the answer ended)"),
        (Fault.RESET, r"failed 6 times \(the connection"),
        (Fault.STATUS_503, r"failed 6 times \(status 503\)"),
        (Fault.STATUS_403, r"refuses access"),
        (Fault.FLIPPED, r"in 3 rounds: .* arrived damaged: its CRC32C? is"),
    ],
)
def test_a_fault_that_stays_is_an_error_with_its_reason_and_no_model(
    store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path, fault: Fault, reason: str
) -> None:
    reference = store.put_model(prefix, model_files())
    proxy.always_fail(fault)
    with pytest.raises(DownloadFailed, match=reason):
        fetch_model(reference, progress=False)
    assert models_in(cache) == []
    proxy.always_fail(None)
    assert contents(fetch_model(reference, progress=False)) == model_files()


def test_a_store_that_stays_silent_is_given_up(
    store: ObjectStore, proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "ATTEMPTS", 2)
    be_impatient(monkeypatch)
    reference = store.put_model(prefix, model_files())
    proxy.always_fail(Fault.STALLED)
    with pytest.raises(DownloadFailed, match=r"failed 2 times \(.*(no answer in time|broke off)"):
        fetch_model(reference, progress=False)


def test_a_store_that_is_down_is_an_error(store: ObjectStore, proxy: FaultProxy, prefix: str) -> None:
    proxy.close()
    with pytest.raises(DownloadFailed, match=r"Listing .* failed 6 times \(the connection was refused"):
        fetch_model(f"{store.scheme}://{BUCKET}/{prefix}", progress=False)


@pytest.mark.full
def test_after_a_failure_only_what_is_missing_is_fetched(
    store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path
) -> None:
    reference = store.put_model(prefix, model_files())
    proxy.fail(Fault.STATUS_403, path="tokenizer.json")
    # Blocks of the weights are on their way when the small file is refused; some of them arrive.
    with pytest.raises(DownloadFailed, match="refuses access"):
        fetch_model(reference, progress=False)
    kept = ranges_on_disk(cache)
    proxy.forget_counts()
    assert contents(fetch_model(reference, progress=False)) == model_files()
    assert kept
    assert not kept & set(proxy.ranges)


def test_a_missing_model_and_a_missing_bucket_are_called_missing(
    store: ObjectStore, proxy: FaultProxy, cache: Path
) -> None:
    with pytest.raises(ModelNotFound, match="There is nothing at"):
        fetch_model(f"{store.scheme}://{BUCKET}/none/such", progress=False)
    with pytest.raises(ModelNotFound, match="There is no bucket"):
        fetch_model(f"{store.scheme}://another-bucket/none", progress=False)
    assert {path.suffix for path in (cache / "objects").iterdir()} == {".lock"}


@ONE_STORE
def test_a_directory_without_a_model_is_refused(store: ObjectStore, proxy: FaultProxy, prefix: str) -> None:
    reference = store.put_model(prefix, {"generation_config.json": b"{}"})
    with pytest.raises(ModelNotFound, match=r"neither a config\.json nor a GGUF file"):
        fetch_model(reference, progress=False)


# --- change ---------------------------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("keeps_preconditions", [True, False], ids=["refused", "unnoticed"])
def test_a_model_that_changes_under_way_arrives_in_one_version(
    store: ObjectStore, proxy: FaultProxy, prefix: str, keeps_preconditions: bool
) -> None:
    """Where the store does not notice, a mixture of both arrives, and the checksum does."""
    reference = store.put_model(prefix, model_files(seed=1))
    proxy.keeps_preconditions = keeps_preconditions

    def change(number: int) -> None:
        if number == 7:
            store.put(f"{prefix}/model.safetensors", weights(2))

    proxy.before_read = change
    assert contents(fetch_model(reference, progress=False)) == model_files(seed=2)


@pytest.mark.full
def test_a_model_that_never_stops_changing_is_an_error(
    store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path
) -> None:
    reference = store.put_model(prefix, model_files())
    proxy.before_read = lambda number: (
        store.put(f"{prefix}/model.safetensors", weights(number)) if number % 4 == 0 else None
    )
    with pytest.raises(DownloadFailed, match=r"in 3 rounds: .* (was overwritten|arrived damaged)"):
        fetch_model(reference, progress=False)
    assert models_in(cache) == []


@pytest.mark.full
def test_a_model_that_is_deleted_under_way_is_an_error(store: ObjectStore, proxy: FaultProxy, prefix: str) -> None:
    files = model_files()
    reference = store.put_model(prefix, files)

    def delete(number: int) -> None:
        if number == 7:
            for name in files:
                store.delete(f"{prefix}/{name}")

    proxy.before_read = delete
    with pytest.raises(ModelNotFound, match="There is nothing at"):
        fetch_model(reference, progress=False)


@pytest.mark.full
def test_a_file_that_goes_between_listing_and_looking_is_left_out(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """It was called missing, though the model was whole without it."""
    for name, value in s3_store.environment(s3_store.url).items():
        monkeypatch.setenv(name, value)
    reference = s3_store.put_model(prefix, model_files() | {"extra.json": b"{}"})
    listed = S3Source.list

    def list_then_delete(source: S3Source, prefix: str) -> Iterator[ObjectInfo]:
        yield from listed(source, prefix)
        s3_store.delete(f"{prefix}extra.json")

    monkeypatch.setattr(S3Source, "list", list_then_delete)
    assert contents(fetch_model(reference, progress=False)) == model_files()


@ONE_STORE
def test_a_download_is_resumed_only_in_the_generation_that_it_began_with(
    store: ObjectStore, proxy: FaultProxy, prefix: str
) -> None:
    reference = store.put_model(prefix, model_files(seed=1))
    proxy.fail(Fault.STATUS_403, path="tokenizer.json")
    with pytest.raises(DownloadFailed):
        fetch_model(reference, progress=False)
    store.put(f"{prefix}/model.safetensors", weights(2))
    assert contents(fetch_model(reference, progress=False)) == model_files(seed=2)


@pytest.mark.full
def test_a_refresh_fetches_what_is_new_and_replaces_the_old(
    store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path
) -> None:
    reference = store.put_model(prefix, model_files())
    first = fetch_model(reference, progress=False)
    store.put(f"{prefix}/config.json", CONFIG + b" ")
    assert fetch_model(reference, progress=False) == first
    proxy.forget_counts()
    second = fetch_model(reference, progress=False, refresh=True)
    assert contents(second) == model_files() | {"config.json": CONFIG + b" "}
    assert [path.rpartition("/")[2].rpartition("%2F")[2] for path in proxy.reads] == ["config.json"]
    assert models_in(cache) == [second]
    proxy.forget_counts()
    assert fetch_model(reference, progress=False, refresh=True) == second
    assert proxy.reads == []


@ONE_STORE
def test_a_refresh_leaves_a_version_in_use(store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path) -> None:
    reference = store.put_model(prefix, model_files())
    first = fetch_model(reference, progress=False)
    with ModelStore().hold(first):
        store.put(f"{prefix}/config.json", CONFIG + b" ")
        second = fetch_model(reference, progress=False, refresh=True)
        assert set(models_in(cache)) == {first, second}
        assert contents(first) == model_files()
    assert fetch_model(reference, progress=False) == second


@pytest.mark.full
def test_a_refresh_goes_back_to_an_older_version_that_is_still_there(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, prefix: str, cache: Path
) -> None:
    """S3 calls a version by its content, so it comes back under its old name; the newer one was loaded all the same."""
    for name, value in s3_store.environment(s3_store.url).items():
        monkeypatch.setenv(name, value)
    reference = s3_store.put_model(prefix, model_files())
    first = fetch_model(reference, progress=False)
    with ModelStore().hold(first):
        s3_store.put(f"{prefix}/config.json", CONFIG + b" ")
        second = fetch_model(reference, progress=False, refresh=True)
        assert second != first
        s3_store.put(f"{prefix}/config.json", CONFIG)
        assert fetch_model(reference, progress=False, refresh=True) == first
    assert fetch_model(reference, progress=False) == first
    assert models_in(cache) == [first]


@ONE_STORE
def test_an_old_version_stays_while_its_files_are_adopted(
    store: ObjectStore, proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could go in between, and the download failed for want of a file that it could have fetched."""
    reference = store.put_model(prefix, model_files())
    fetch_model(reference, progress=False)
    store.put(f"{prefix}/config.json", CONFIG + b" ")
    adopt = partial.Partial.adopt

    def lose_then_adopt(download: partial.Partial, name: str, info: ObjectInfo, file: Path) -> None:
        with suppress(BadRequest):
            ModelStore().remove(next(each for each in file.parents if "@" in each.name))
        adopt(download, name, info, file)

    monkeypatch.setattr(partial.Partial, "adopt", lose_then_adopt)
    path = fetch_model(reference, progress=False, refresh=True)
    assert contents(path) == model_files() | {"config.json": CONFIG + b" "}


@ONE_STORE
def test_an_old_version_that_goes_before_its_adoption_is_not_missed(
    store: ObjectStore, proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = store.put_model(prefix, model_files())
    fetch_model(reference, progress=False)
    store.put(f"{prefix}/config.json", CONFIG + b" ")
    find = ModelStore.find

    def find_then_lose(models: ModelStore, model: StoreAddress) -> Path | None:
        found = find(models, model)
        if found is not None:
            models.remove(found)
        return found

    monkeypatch.setattr(ModelStore, "find", find_then_lose)
    path = fetch_model(reference, progress=False, refresh=True)
    assert contents(path) == model_files() | {"config.json": CONFIG + b" "}


@ONE_STORE
def test_the_same_address_at_another_endpoint_is_another_model(
    store: ObjectStore, proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = store.put_model(prefix, model_files())
    first = fetch_model(reference, progress=False)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
    assert fetch_model(reference, progress=False) != first
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"{proxy.url}/")
    assert fetch_model(reference, progress=False) == first


@ONE_STORE
def test_a_rotten_file_of_the_old_version_does_not_get_into_the_new(
    store: ObjectStore, proxy: FaultProxy, prefix: str
) -> None:
    reference = store.put_model(prefix, model_files())
    path = fetch_model(reference, progress=False) / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    store.put(f"{prefix}/config.json", CONFIG + b" ")
    assert contents(fetch_model(reference, progress=False, refresh=True))["model.safetensors"] == weights(0)


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_killed_download_is_resumed_with_what_is_missing(
    store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path
) -> None:
    files = {"config.json": CONFIG, "model.safetensors": weights(0, blocks=40)}
    reference = store.put_model(prefix, files)
    proxy.seconds_a_read = 0.1
    process = fetching_process(reference)
    deadline = time.monotonic() + 30
    while proxy.num_bytes < 20 * BLOCK:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    kept = ranges_on_disk(cache)
    assert 10 <= len(kept) < 40
    # Requests of the killed process may still come in: none of them is for a range that it had recorded.
    proxy.forget_counts()
    proxy.seconds_a_read = 0.0
    assert contents(fetch_model(reference, progress=False)) == files
    assert not kept & set(proxy.ranges)


@pytest.mark.full
def test_two_processes_fetch_a_model_once(store: ObjectStore, proxy: FaultProxy, prefix: str) -> None:
    files = model_files()
    reference = store.put_model(prefix, files)
    proxy.seconds_a_read = 0.1
    processes = [fetching_process(reference) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    [path] = {Path(out.strip()) for out, _ in answers}
    assert contents(path) == files
    assert proxy.num_bytes == sum(map(len, files.values()))


@ONE_STORE
def test_the_log_says_that_it_waits_for_another_process(
    store: ObjectStore,
    proxy: FaultProxy,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_module, "_QUIET_SECONDS", 0.0)
    reference = store.put_model(prefix, model_files())
    line = f"waiting for the download of {reference} in another process"
    with caplog.at_level("INFO", logger="ostro"), ThreadPoolExecutor() as threads:
        with ModelStore().fetching(parse_address(reference)):
            fetched = threads.submit(fetch_model, reference, progress=False)
            deadline = time.monotonic() + 30
            while line not in [record.getMessage() for record in caplog.records]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert contents(fetched.result()) == model_files()


# --- room -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of one megabyte, with the cache on it."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    monkeypatch.setenv("OSTRO_CACHE", str(directory / "cache"))
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@ONE_STORE
def test_a_model_that_cannot_fit_is_refused_before_it_is_fetched(
    store: ObjectStore, proxy: FaultProxy, prefix: str, small_disk: Path
) -> None:
    reference = store.put_model(prefix, {"config.json": CONFIG, "model.safetensors": weights(0, blocks=20)})
    with pytest.raises(DiskFull, match=r"1 MB are needed and 1 MB are free"):
        fetch_model(reference, progress=False)
    assert proxy.reads == []


@pytest.mark.full
def test_a_disk_that_fills_under_way_is_an_error_that_leaves_room(
    store: ObjectStore, proxy: FaultProxy, prefix: str, small_disk: Path
) -> None:
    reference = store.put_model(prefix, model_files())

    def fill(number: int) -> None:
        if number == 7:
            with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    proxy.before_read = fill
    with pytest.raises(DiskFull, match="the disk is full"):
        fetch_model(reference, progress=False)
    proxy.before_read = None
    (small_disk / "other").unlink()
    assert not list((small_disk / "cache" / "objects").glob("*.partial"))
    assert contents(fetch_model(reference, progress=False)) == model_files()


@ONE_STORE
def test_an_old_model_makes_room_for_a_new_one(
    store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", "1200K")
    references = [store.put_model(f"{prefix}-{number}", model_files()) for number in range(3)]
    paths = []
    for age, reference in enumerate(references):
        paths.append(fetch_model(reference, progress=False))
        moment = time.time() - 100 + age
        os.utime(paths[-1], (moment, moment))
    assert set(models_in(cache)) == set(paths[1:])
    with ModelStore().hold(paths[1]):
        fetch_model(references[0], progress=False)
        assert set(models_in(cache)) == {paths[0], paths[1]}


@ONE_STORE
def test_downloads_at_once_do_not_outgrow_the_limit(
    store: ObjectStore, proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looked only at what had arrived of the others, so all were let in."""
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", "800K")
    references = [store.put_model(f"{prefix}-{number}", model_files()) for number in range(3)]
    proxy.seconds_a_read = 0.2
    with ThreadPoolExecutor() as threads:
        fetches = [threads.submit(fetch_model, reference, progress=False) for reference in references]
    errors = [fetch.exception() for fetch in fetches]
    assert errors.count(None) == 1
    assert all(isinstance(error, DiskFull) for error in errors if error)
    assert "active downloads cannot be evicted" in str(next(filter(None, errors)))
    assert len(ModelStore().entries()) == 1


@ONE_STORE
def test_a_version_that_shares_its_weights_with_one_in_use_needs_no_room_for_them(
    store: ObjectStore, proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one file with two names, and were counted twice."""
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", "800K")
    reference = store.put_model(prefix, model_files())
    first = fetch_model(reference, progress=False)
    store.put(f"{prefix}/config.json", CONFIG + b" ")
    with ModelStore().hold(first):
        second = fetch_model(reference, progress=False, refresh=True)
        assert (first / "model.safetensors").samefile(second / "model.safetensors")


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "library", "extra"), [("gs://bucket/m", "google.cloud", "gcs"), ("s3://bucket/m", "boto3", "s3")]
)
def test_a_missing_library_is_named_by_its_extra(
    reference: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Unsupported, match=re.escape(install_command(extra))):
        fetch_model(reference, progress=False)


def test_a_compressed_object_is_refused(gcs_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_store.url)
    reference = gcs_store.put_model(prefix, {"config.json": CONFIG})
    gcs_store.patch(f"{prefix}/config.json", contentEncoding="gzip")
    with pytest.raises(DownloadFailed, match=r"Content-Encoding gzip\. Store it uncompressed"):
        fetch_model(reference, progress=False)


def test_a_compressed_object_beside_the_model_disturbs_nobody(
    gcs_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """One anywhere in a bucket made every model in it impossible to list or to fetch."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_store.url)
    reference = gcs_store.put_model(prefix, model_files() | {"README.md": b"words"})
    gcs_store.patch(f"{prefix}/README.md", contentEncoding="gzip")
    assert contents(fetch_model(reference, progress=False)) == model_files()
    assert list_models(reference)


def test_a_compressed_object_of_s3_is_refused(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    for name, value in s3_store.environment(s3_store.url).items():
        monkeypatch.setenv(name, value)
    reference = s3_store.put_model(prefix, model_files())
    s3_client(s3_store.url).put_object(
        Bucket=BUCKET, Key=f"{prefix}/config.json", Body=b"packed", ContentEncoding="gzip"
    )
    with pytest.raises(DownloadFailed, match=r"Content-Encoding gzip\. Store it uncompressed"):
        fetch_model(reference, progress=False)


def test_block_size_of_these_tests_is_in_force() -> None:
    """Their models have many blocks only if it is."""
    assert partial.BLOCK_BYTES == BLOCK
