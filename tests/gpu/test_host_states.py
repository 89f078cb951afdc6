"""Host memory below recurrent states: copies are of what states held when they were asked for, and a fetched one
continues to the same tokens. A state may be in one tensor, in two, or in one for each layer and part.
"""

from random import Random

import pytest
import torch
from every_family import config_of
from fake_tiers import FixedCosts
from family_case import SIZES
from tiny_models import random_model
from torch import Tensor
from triton_device import DEVICE

from ostro.backends.cuda.host_store import HostStore
from ostro.backends.cuda.tiers import check_disk, host_room
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.page_store import Fetch, Move, StateCopy, Store, StoreState
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits
from ostro.engine.tiers import Tiers
from ostro.errors import Unsupported
from ostro.sampling_params import SamplingParams

WIDTHS = [(1000,), (48, 7), (4, 3, 5, 2)]


def filled(num_records: int, *sizes: int) -> Tensor:
    return torch.randint(0, 256, (num_records, *sizes), dtype=torch.uint8, device=DEVICE)


def of(states: list[Tensor], at: int) -> list[Tensor]:
    return [each[at].clone().cpu() for each in states]


@pytest.mark.parametrize("num_tensors", [1, 2, 3])
def test_states_come_back_as_they_were_whatever_is_written_meanwhile(num_tensors: int) -> None:
    """Stores, fetches and steps that overwrite states, in random order among pages."""
    draw, pages = Random(5), filled(2, 2, 9, 64)
    states = [filled(13, *sizes) for sizes in WIDTHS[:num_tensors]]
    overwritten: list[int] = []
    store = HostStore(pages, 8, states=states, num_state_slots=6, overwritten=overwritten.append)
    assert store.state_bytes == sum(each[0].nbytes for each in states)
    slots: dict[int, list[Tensor]] = {}
    for ticket in range(1, 40):
        moves: list[Move] = [Store(draw.randrange(8), draw.randrange(8)) for _ in range(draw.randrange(3))]
        for state in draw.sample(range(13), draw.randrange(0, 4)):
            slot = draw.randrange(6)
            moves.append(StoreState(state, slot))
            slots[slot] = of(states, state)
        store.carry_out(moves)
        # The next step overwrites what was stored.
        for move in moves:
            if isinstance(move, StoreState):
                for each in states:
                    each[move.state] = ticket
        if not slots:
            continue
        known, target = draw.choice(sorted(slots)), draw.randrange(13)
        store.carry_out([Fetch(ticket, (), (), StateCopy(known, target))])
        while not (arrived := store.arrivals(timeout=1.0)):
            pass
        assert [(each.ticket, each.num_good, each.has_state) for each in arrived] == [(ticket, 0, True)]
        assert overwritten[-1] == target
        assert all(map(torch.equal, of(states, target), slots[known]))
    store.close()


def engine(*, num_pages: int, host: bool) -> EngineCore:
    """Torch's runner on a CPU, whose tensors lie as a GPU's do: with one head, its pages are in order."""
    model = random_model(config_of("qwen3_5", {**SIZES, "num_key_value_heads": 1}))
    runner = TorchRunner(model, page_size=16, num_pages=num_pages, num_states=4)
    [stack] = runner.cache.stacks
    tiers = None
    if host:
        pages = stack.view(*stack.shape[:2], num_pages, -1)
        states = runner.states.tensors
        store = HostStore(pages, 64, states=states, num_state_slots=8, overwritten=runner.note_overwritten)
        tiers = Tiers(store, costs=FixedCosts(1.0))
    return EngineCore(runner, Limits(max_batch_tokens=64, max_batch_seqs=4), tiers=tiers)


def answer(core: EngineCore, id: int, *prompt: int) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=0)
    core.add(Request(id=id, prompt_ids=prompt, params=params, seed=0, anchors=(33,)))
    token_ids, logprobs = list[int](), list[float]()
    while core.has_work:
        for gain in core.step():
            token_ids += gain.token_ids
            logprobs += [each.logprob for each in gain.logprobs]
        core.check_integrity()
    return token_ids, logprobs


def test_a_prompt_whose_state_is_fetched_from_host_memory_gets_the_same_tokens() -> None:
    core = engine(num_pages=8, host=True)
    prompts = [tuple((7 * stem + at * at) % 31 for at in range(36)) for stem in range(5)]
    for id, stem in enumerate((0, 0, 1, 2, 3, 4, 0)):
        prompt = (*prompts[stem], id)
        token_ids, logprobs = answer(core, id, *prompt)
        expected_ids, expected = answer(engine(num_pages=8, host=False), id, *prompt)
        assert token_ids == expected_ids
        assert logprobs == pytest.approx(expected, abs=1e-5)
    counters = core.scheduler.counters
    assert counters.stored_states > 0
    assert counters.fetched_states == 1
    assert counters.cache_hits == 64
    core.close()


def test_host_memory_is_divided_between_pages_and_states() -> None:
    assert host_room(1000, 10, 0) == (100, 0)
    assert host_room(1000, 10, 100) == (80, 2)
    assert host_room(1000, 10, 400) == (100, 0)


def test_a_disk_below_a_gpu_is_refused_for_states_by_name() -> None:
    check_disk(EngineConfig(kv_host_memory=1 << 30), 100)
    check_disk(EngineConfig(kv_disk="somewhere"), 0)
    with pytest.raises(Unsupported, match="kv_shared does not work on a GPU with models whose layers keep recurrent"):
        check_disk(EngineConfig(kv_host_memory=1 << 30, kv_shared="somewhere"), 100)
