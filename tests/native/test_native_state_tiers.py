"""The disk below the native core's recurrent states: what is fetched or handed over gives what is computed cold, to the
last bit.
"""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from every_family import config_of, some
from guessed_drafts import ReplayedDrafts
from native_directory import write
from native_models import native, needs_library, packed
from test_native_runner import SIZES, Gains, ask, drain, run, tokens
from test_native_states import NAMES, model_of

from ostro.backends.loading import load_runner
from ostro.backends.tiers.disk_store import DiskStore
from ostro.backends.tiers.opening import open_tiers
from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import file_bytes, open_page_file
from ostro.backends.tiers.state_records import StateRecords
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.drafter import MOST_DRAFTS
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits
from ostro.engine.tiers import Tiers
from ostro.kernels.cpu.library import PAGE
from ostro.kernels.cpu.packed_file import PackedFile
from ostro.sampling_params import SamplingParams
from ostro.weights import open_checkpoint

pytestmark = needs_library

EVERY = pytest.mark.parametrize("name", some(NAMES, "qwen3_5", "granitemoehybrid"))
PARAMS = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
PROMPT = tuple((7 * at + at * at) % 60 for at in range(70))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _own_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights are kept from test to test, prefixes are not."""
    monkeypatch.setenv("OSTRO_CACHE", str(home / "cache"))
    for each in ("shared", "cache/pages"):
        shutil.rmtree(home / each, ignore_errors=True)


@pytest.fixture(scope="module")
def weights(home: Path) -> "_Weights":
    return _Weights(home)


class _Weights:
    """Each model packed once."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._made: dict[str, PackedFile] = {}

    def __call__(self, name: str) -> PackedFile:
        if name not in self._made:
            config = config_of(name, SIZES, max_position_embeddings=512)
            self._made[name] = packed(config, model_of(name), self._home / name)
        return self._made[name]


@contextmanager
def over_disk(
    weights: PackedFile, directory: Path, *, pages: int, states: int, drafts: Gains | None = None
) -> Iterator[EngineCore]:
    runner = native(weights, pages=pages, states=states)
    size = runner.page_bytes
    file = open_page_file(directory, None, identity=bytes(32), page_bytes=size, limit=file_bytes(4000, size))
    store = DiskStore(runner.program, PageDisk(file), outlives=False, states=runner)
    core = EngineCore(
        runner,
        Limits(max_batch_tokens=64, max_batch_seqs=8),
        tiers=Tiers(store, root=lambda salt: bytes(32) if salt == "" else None),
        speculation=ReplayedDrafts(tokens(drafts), accuracy=0.8, most=MOST_DRAFTS) if drafts else None,
    )
    yield core
    core.close()


@EVERY
@pytest.mark.parametrize("drafts", [False, True])
def test_a_state_from_disk_equals_the_one_that_was_computed(
    name: str, drafts: bool, weights: _Weights, tmp_path: Path
) -> None:
    """A system prompt that many use comes back after others took its room, whatever slot it comes to."""
    system = ask(0, 3 * PAGE + 1, PARAMS).prompt_ids
    asked = []
    for id in range(12):
        own = ask(id, 20, PARAMS)
        asked.append(replace(own, prompt_ids=(*system, *own.prompt_ids), anchors=(len(system),)))
    others = [ask(50 + id, 90, PARAMS) for id in range(6)]
    alone = native(weights(name))
    cold = {key: gains for each in (*asked, *others) for key, gains in run(alone, each).items()}
    given: Gains = {}
    with over_disk(weights(name), tmp_path, pages=20, states=3, drafts=cold if drafts else None) as core:
        for some_of, other in ((asked[:4], others[:3]), (asked[4:8], others[3:]), (asked[8:], [])):
            for each in (*some_of, *other):
                given |= drain(core, each)
        assert core.scheduler.counters.spilled_states > 0
        assert core.scheduler.counters.fetched_states > 0
    assert given == cold


@EVERY
@pytest.mark.parametrize("drafts", [False, True])
def test_a_parked_sequence_resumes_to_the_last_bit(name: str, drafts: bool, weights: _Weights, tmp_path: Path) -> None:
    """At the token where it was preempted, wherever in a page that was, with its pages from disk."""
    params = replace(PARAMS, max_tokens=40)
    asked = [ask(id, length, params) for id, length in enumerate((10, 14, 9, 31))]
    cold = {key: gains for each in asked for key, gains in run(native(weights(name)), each).items()}
    with over_disk(weights(name), tmp_path, pages=9, states=8, drafts=cold if drafts else None) as core:
        assert drain(core, *asked) == cold
        counters = core.scheduler.counters
        assert counters.resumed > 0
        assert drafts or counters.resumed == counters.preemptions


def engine(model: Path, **settings: object) -> EngineCore:
    given = {"kv_memory": 8 << 20, "threads": 1, "max_batch_seqs": 4, **settings}
    config = EngineConfig(model=str(model), device="cpu", **given)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(model)
    runner = load_runner(checkpoint, config)
    return EngineCore(runner, tiers=open_tiers(checkpoint, config, runner))


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return write(home / "model", config_of("qwen3_5", SIZES, max_position_embeddings=512))


def request(**settings: object) -> Request:
    return Request(id=0, prompt_ids=PROMPT, params=PARAMS, seed=0, **settings)  # type: ignore[arg-type]


def test_the_next_start_continues_from_the_last_states(model: Path) -> None:
    first = engine(model, kv_persist=True)
    cold = drain(first, request())
    first.close()
    second = engine(model, kv_persist=True)
    assert second.num_found(PROMPT) == 64
    assert drain(second, request()) == cold
    assert (second.scheduler.counters.cache_hits, second.scheduler.counters.fetched_states) == (64, 1)
    second.close()


def test_a_prompt_that_is_handed_over_is_continued_to_the_last_bit(model: Path, home: Path) -> None:
    """Its pages, a state at the last page boundary, and the rest computed again."""
    first, second = (engine(model, kv_shared=str(home / "shared")) for _ in range(2))
    cold = drain(first, request(shares_prompt=True))
    assert offered(first) == 64
    look(second)
    assert second.num_found(PROMPT) == 64
    before = second.scheduler.counters.computed_tokens
    assert drain(second, request()) == cold
    assert second.scheduler.counters.cache_hits == 64
    assert second.scheduler.counters.computed_tokens - before == len(PROMPT) - 64 + PARAMS.max_tokens - 1  # type: ignore[operator]
    for core in (first, second):
        core.close()


def test_an_engine_that_stops_leaves_its_conversations_to_those_that_run(model: Path, home: Path) -> None:
    first, second = (engine(model, kv_shared=str(home / "shared")) for _ in range(2))
    cold = drain(first, request())
    told: list[None] = []
    first.offer_all(lambda: told.append(None))
    while first.has_work:
        first.step()
    assert told == [None]
    look(second)
    assert drain(second, request()) == cold
    assert second.scheduler.counters.cache_hits == 64
    for core in (first, second):
        core.close()


@pytest.mark.parametrize("damaged", range(4))
def test_a_damaged_record_costs_time_and_no_token(model: Path, home: Path, damaged: int) -> None:
    """Pages or parts of the state: wherever the file is damaged, the rest is computed."""
    first, second = (engine(model, kv_shared=str(home / "shared")) for _ in range(2))
    cold = drain(first, request(shares_prompt=True))
    assert offered(first) == 64
    look(second)
    [path] = (home / "shared").glob("*/*.pages")
    content = bytearray(path.read_bytes())
    content[len(content) * (2 * damaged + 1) // 8] ^= 1
    path.write_bytes(content)
    assert drain(second, request()) == cold
    assert second.scheduler.counters.cache_hits == 0
    for core in (first, second):
        core.close()


def test_a_state_is_cut_into_parts_of_a_pages_size_and_put_together_again() -> None:
    for state_bytes, page_bytes, num_parts in ((100, 30, 4), (90, 30, 3), (8, 30, 1)):
        records, state = StateRecords(state_bytes, page_bytes), np.arange(state_bytes, dtype=np.uint8)
        parts, again = records.copies(state), np.zeros(state_bytes, np.uint8)
        assert len(parts) == len({*records.digests(bytes(32))}) == records.num_parts == num_parts
        assert {len(part) for part in parts} == {page_bytes}
        targets = records.targets(again)
        for target, part in zip(targets, parts, strict=True):
            target[:] = part
        records.complete(again, targets)
        assert (again == state).all()


def offered(core: EngineCore) -> int:
    told: list[int] = []
    core.offer(PROMPT, None, told.append)
    while core.has_work:
        core.step()
    [num_tokens] = told
    return num_tokens


def look(core: EngineCore) -> None:
    looked = threading.Event()
    core.look(looked.set)
    assert looked.wait(60)
