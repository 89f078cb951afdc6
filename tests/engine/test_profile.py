"""Profiles of an engine's steps: what is in them, when they end, and that they change nothing."""

from pathlib import Path

import pytest
from engine_driver import Driver, make_request
from scripted_grammar import EOS, scripted
from traces import named, read_spans

from ostro.backends.fake import FakeRunner
from ostro.engine.core import EngineCore
from ostro.engine.profile import Profiler, Recorded, new_trace
from ostro.engine.request import Request
from ostro.errors import BadRequest, ProfileFailed


def run(core: EngineCore, *requests: Request) -> list[int]:
    for request in requests:
        core.add(request)
    return [token for step in iter(core.step, []) for gain in step for token in gain.token_ids]


def test_each_step_has_a_span_with_its_parts_inside(tmp_path: Path) -> None:
    core, recorded = EngineCore(FakeRunner()), list[Recorded]()
    core.start_profile(tmp_path / "a.json.gz", max_steps=100, ended=recorded.append)
    run(core, make_request(1, range(10), max_tokens=4), make_request(2, range(50, 53), max_tokens=4))
    core.end_profile()
    steps = core.scheduler.counters.steps
    assert recorded == [Recorded(steps)]
    spans = read_spans(tmp_path / "a.json.gz")
    working = [span for span in named(spans, "step") if any(map(span.holds, named(spans, "launch")))]
    assert len(working) == steps
    for step in working:
        [schedule], [launch], [collect] = (
            [span for span in named(spans, name) if step.holds(span)] for name in ("schedule", "launch", "collect")
        )
        assert schedule.ended <= launch.began <= launch.ended <= collect.began
    first, *later = named(spans, "launch")
    assert first.args == {"sequences": 2, "tokens": 13, "sampled": 2}
    assert [span.args for span in later] == [{"sequences": 2, "tokens": 2, "sampled": 2}] * (steps - 1)


def test_deferred_sampling_has_a_span(tmp_path: Path) -> None:
    driver = Driver(steps_ahead=1, masks_late=True)
    driver.engine.start_profile(tmp_path / "a.json.gz", max_steps=100, ended=lambda _: None)
    grammar = scripted({0: {10: 1, 11: 1}, 1: {20: 2, 21: 2}, 2: {30: 3, 31: 3}})
    driver.run(make_request(1, range(10), max_tokens=20, eos_ids=(EOS,), constraint=grammar))
    driver.engine.end_profile()
    assert named(read_spans(tmp_path / "a.json.gz"), "sample")


def test_profile_ends_after_its_number_of_steps_and_the_engine_goes_on(tmp_path: Path) -> None:
    def tokens(core: EngineCore) -> list[int]:
        return run(core, make_request(1, range(10), max_tokens=8))

    core, recorded = EngineCore(FakeRunner()), list[Recorded]()
    core.start_profile(tmp_path / "a.json.gz", max_steps=3, ended=recorded.append)
    assert tokens(core) == tokens(EngineCore(FakeRunner()))
    assert recorded == [Recorded(3)]
    assert len(named(read_spans(tmp_path / "a.json.gz"), "launch")) == 3
    core.end_profile()
    assert recorded == [Recorded(3)], "it has ended already"


def test_profile_that_cannot_be_written_says_so_and_the_engine_goes_on(tmp_path: Path) -> None:
    core, recorded = EngineCore(FakeRunner()), list[Recorded]()
    core.start_profile(tmp_path / "nowhere" / "a.json.gz", max_steps=1, ended=recorded.append)
    assert len(run(core, make_request(1, range(10), max_tokens=8))) == 8
    [(steps, error)] = recorded
    assert steps == 1
    assert error is not None
    assert "cannot be written" in error


def test_one_profile_at_a_time(tmp_path: Path) -> None:
    core = EngineCore(FakeRunner())
    core.start_profile(tmp_path / "a.json.gz", max_steps=1, ended=lambda _: None)
    with pytest.raises(BadRequest, match="already"):
        core.start_profile(tmp_path / "b.json.gz", max_steps=1, ended=lambda _: None)
    core.end_profile()
    core.start_profile(tmp_path / "b.json.gz", max_steps=1, ended=lambda _: None)
    core.end_profile()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.gz", "b.json.gz"]


class _Unprofilable(FakeRunner):
    def profiler(self) -> Profiler:
        raise RuntimeError("another profiler is running")


def test_profiler_that_does_not_start_is_refused_and_the_engine_goes_on(tmp_path: Path) -> None:
    core = EngineCore(_Unprofilable())
    with pytest.raises(ProfileFailed, match="another profiler"):
        core.start_profile(tmp_path / "a.json.gz", max_steps=1, ended=lambda _: None)
    assert len(run(core, make_request(1, range(10), max_tokens=8))) == 8


def test_traces_are_named_after_the_model_and_stay_in_the_directory(tmp_path: Path) -> None:
    paths = [new_trace(tmp_path / "new", name) for name in ("org/model", "../../etc", "..")]
    assert {path.parent for path in paths} == {(tmp_path / "new").resolve()}
    assert paths[0].name.startswith("org-model-")
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileFailed, match="cannot be created"):
        new_trace(tmp_path / "file" / "new", "model")
