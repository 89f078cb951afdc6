"""Host memory below a GPU's pages: copies are of what pages held when they were asked for, and tokens stay the same."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fake_tiers import FixedCosts
from tiny_models import LLAMA, VOCAB, random_model
from torch import Tensor
from triton_device import DEVICE

from ostro.backends.cuda.host_slots import pinned, unpin
from ostro.backends.cuda.host_store import HostStore
from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.cuda.tiers import HostRoom, pinned_store
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.page_store import Fetch, Move, Store
from ostro.engine.request import Request
from ostro.engine.tiers import Tiers
from ostro.errors import ModelError
from ostro.sampling_params import SamplingParams

ON_GPU = DEVICE.type == "cuda"
SHAPE = (3, 2, 41, 2, 16, 64) if not ON_GPU else (16, 2, 401, 8, 64, 128)
QWEN3: Mapping[str, object] = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "num_hidden_layers": 1}


def filled(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=DEVICE)
    return numbers.view(dtype)


def as_bytes(memory: Tensor, page: int) -> Tensor:
    return memory.view(torch.uint8)[:, :, page].clone().cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_come_back_as_they_were_whatever_is_written_meanwhile(dtype: torch.dtype) -> None:
    """Stores, fetches and steps that overwrite pages, in random order, against a plain model of them."""
    draw, memory = Random(3), filled(dtype)
    num_pages, num_slots = SHAPE[2] - 1, 30
    store = HostStore(memory, num_slots)
    slots: dict[int, Tensor] = {}
    for ticket in range(1, 30):
        moves: list[Move] = []
        for page in draw.sample(range(num_pages), draw.randrange(0, 12)):
            slot = draw.randrange(num_slots)
            moves.append(Store(page, slot))
            slots[slot] = as_bytes(memory, page)
        known = draw.sample(sorted(slots), min(len(slots), draw.randrange(1, 12)))
        pages = draw.sample(range(num_pages), len(known))
        store.carry_out(moves)
        # The next step overwrites what was stored.
        memory.view(torch.uint8)[:, :, [move.page for move in moves if isinstance(move, Store)]] = ticket
        if not known:
            continue
        store.carry_out([Fetch(ticket, tuple(known), tuple(pages))])
        while not (arrived := store.arrivals(timeout=1.0)):
            pass
        assert [(each.ticket, each.num_good) for each in arrived] == [(ticket, len(pages))]
        for slot, page in zip(known, pages, strict=True):
            assert torch.equal(as_bytes(memory, page), slots[slot])
    store.close()


def test_pages_of_odd_sizes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of few slots, and pages whose bytes no wide number divides."""
    monkeypatch.setattr("ostro.backends.cuda.host_slots._SEGMENT_BYTES", 200)
    memory = filled(torch.float8_e4m3fn, (1, 2, 9, 1, 3, 5))
    store = HostStore(memory, 8)
    before = [as_bytes(memory, page) for page in range(8)]
    store.carry_out([Store(page, 7 - page) for page in range(8)])
    memory.view(torch.uint8)[:] = 0
    store.carry_out([Fetch(1, tuple(range(8)), tuple(range(8)))])
    while not store.arrivals(timeout=1.0):
        pass
    assert all(torch.equal(as_bytes(memory, page), before[7 - page]) for page in range(8))
    store.close()


def engine(num_pages: int, *, slots: int) -> EngineCore:
    model = random_model(QWEN3).to(DEVICE)
    runner = GpuRunner(model, page_size=16, num_pages=num_pages, max_batch_tokens=64, max_batch_seqs=4)
    if not slots:
        return EngineCore(runner)
    return EngineCore(runner, tiers=Tiers(runner.host_store(slots), costs=FixedCosts(1.0)))


@pytest.mark.full
def test_a_prompt_that_is_fetched_gets_the_same_token() -> None:
    """Two prompts in turn, where there is room for one."""
    core, found = engine(3, slots=8), []
    for id in range(3):
        prompt = tuple((7 * (id % 2) + at * at) % VOCAB for at in range(36))
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=0)
        core.add(Request(id=id, prompt_ids=prompt, params=params, seed=0))
        while core.has_work:
            found += [(gain.token_ids, gain.logprobs[0].logprob) for gain in core.step()]
            core.check_integrity()
    cold, _, hit = found
    assert hit[0] == cold[0]
    assert hit[1] == pytest.approx(cold[1], abs=1e-5)
    assert core.scheduler.counters.fetched_pages == 2
    assert core.scheduler.counters.cache_hits == 2 * 16
    core.close()


class Registry:
    """Stands in for CUDA's: which memory is registered."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.registered: dict[int, int] = {}
        self._room = room

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if size > self._room:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def test_memory_is_pinned_in_pieces_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registry)
    pieces = pinned([10_000, 4096, 5])
    assert [piece.nbytes for piece in pieces] == [10_000, 4096, 5]
    assert sorted(registry.registered.values()) == [5, 4096, 10_000]
    pieces[0].fill_(7)
    unpin(pieces)
    assert not registry.registered


def test_memory_that_cannot_be_pinned_is_an_error_and_the_rest_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(room=4500)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registry)
    with pytest.raises(MemoryError, match=r"host memory cannot be pinned \(CUDA error 2\)"):
        pinned([4000, 5000, 10])
    assert not registry.registered


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_memory_to_pin_is_private_since_shared_memory_has_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", Registry)
    [piece] = pinned([8 << 20])
    modes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        first, stop = (int(each, 16) for each in span.split("-"))
        if first <= piece.data_ptr() < stop:
            modes.append(mode)
    assert modes == ["rw-p"]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"kv_host_memory": 1 << 20}, r"cannot be pinned\. Lower kv_host_memory\."),
        ({"kv_disk": "somewhere"}, r"cannot be pinned\. Free some, or leave kv_disk out\."),
    ],
)
def test_the_setting_that_asked_for_too_much_memory_is_named(settings: dict[str, Any], advice: str) -> None:
    def host_store(num_slots: int, num_state_slots: int) -> HostStore:
        raise MemoryError("4.0 GiB of host memory cannot be pinned")

    with pytest.raises(ModelError, match=advice):
        pinned_store(host_store, EngineConfig(model="any", **settings), HostRoom(4, 0))
