"""bench/gpu_switches.py: each variant computes the same tokens, in its own way and with its own graphs."""

import pytest
import torch
from test_gpu_runner import SHALLOW
from tiny_models import random_model

from gpu_switches import Switches
from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.cuda.shared_prefixes import PrefixLimits
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.sampling_params import SamplingParams

HEAD = tuple(range(1, 17))


def tokens(core: EngineCore) -> dict[int, list[int]]:
    core.scheduler.kv.clear_cache()
    found: dict[int, list[int]] = {1: [], 2: []}
    for id in found:
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        core.add(Request(id=id, prompt_ids=(*HEAD, id), params=params, seed=id))
    while core.has_work:
        for gain in core.step():
            found[gain.request_id] += gain.token_ids
    return found


@pytest.mark.full
def test_each_variant_gives_the_same_tokens_and_has_its_own_graphs(device: torch.device) -> None:
    runner = GpuRunner(
        random_model(SHALLOW).to(device),
        page_size=16,
        num_pages=16,
        max_batch_tokens=64,
        max_batch_seqs=4,
        prefix_limits=PrefixLimits(rows=2, tokens=16, saved=16),
    )
    core, switches = EngineCore(runner), Switches(EngineCore(runner))
    none, everything = frozenset[str](), frozenset(switches.by_name)
    switches.use(none)
    expected = tokens(core)
    for names in (*map(frozenset, zip(switches.by_name, strict=True)), everything):
        switches.use(names)
        assert tokens(core) == expected
    made = runner.part.graphs.made
    assert any(kind.shares_prefixes for _, kind in made)
    switches.use(none)
    assert runner.part.graphs.made
    assert not any(kind.shares_prefixes for _, kind in runner.part.graphs.made)
    assert runner.part.mixed.most == 0
