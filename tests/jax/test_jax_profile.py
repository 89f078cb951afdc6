"""Profiles of the JAX runner: the engine's spans around what JAX does."""

from pathlib import Path

from jax_models import FAMILIES, jax_runner
from native_models import savable_model
from traces import named, read_spans

from ostro.engine.core import EngineCore
from ostro.engine.profile import Recorded
from ostro.engine.request import Request
from ostro.sampling_params import SamplingParams


def test_profile_shows_what_jax_executes_in_each_step(tmp_path: Path) -> None:
    model = savable_model(FAMILIES["llama"])
    core, recorded = EngineCore(jax_runner(FAMILIES["llama"], model, pages=16, budget=8, rows=2)), list[Recorded]()
    core.start_profile(tmp_path / "a.json.gz", max_steps=100, ended=recorded.append)
    core.add(Request(id=1, prompt_ids=(5, 6, 7), params=SamplingParams(max_tokens=4, ignore_eos=True), seed=1))
    while core.has_work:
        core.step()
    core.end_profile()
    steps = core.scheduler.counters.steps
    assert recorded == [Recorded(steps)]
    spans = read_spans(tmp_path / "a.json.gz")
    launches = named(spans, "launch")
    assert len(launches) == steps
    assert launches[0].args == {"sequences": "1", "tokens": "3", "sampled": "1"}
    for launch in launches:
        assert any("Execute" in span.name for span in spans if launch.holds(span))
    assert len(named(spans, "collect")) == steps
