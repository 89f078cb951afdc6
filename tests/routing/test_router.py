"""Where a request goes, by the replicas' health, loads, models and prefixes."""

import pickle
import random
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostro.routing.key import Key
from ostro.routing.prefix_index import PrefixIndex
from ostro.routing.report import Latest, Report
from ostro.routing.router import Router

MODEL = "model"


def prompt(name: str, blocks: int = 10) -> tuple[bytes, ...]:
    """A chain of digests: what begins alike has the same name."""
    return tuple(f"{name}{n:07}".encode() for n in range(blocks))


def key(name: str = "p", *, model: str = MODEL, blocks: int = 10, num_history: int = 10) -> Key:
    return Key(model, prompt(name, blocks), num_history)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def router_of(loads: dict[str, int], *, index: PrefixIndex | None = None, clock: Clock | None = None) -> Router:
    router = Router(now=clock or Clock(), dice=random.Random(7), index=index)
    for name, load in loads.items():
        router.report(name, loaded(load))
    return router


def loaded(load: int = 0, *, models: Iterable[str] = (MODEL,), held: Sequence[bytes] = ()) -> Report:
    return Report(load=load, models=frozenset(models), num_models=len(frozenset(models)), held=latest(held))


def latest(prefixes: Sequence[bytes], num_ever: int | None = None) -> Latest:
    return Latest.of(prefixes, len(prefixes) if num_ever is None else num_ever)


def test_request_goes_to_its_prefix_unless_there_is_much_more_to_do() -> None:
    for holder, other, best in ((8, 0, "holder"), (9, 0, "other"), (158, 100, "holder"), (159, 100, "other")):
        router = router_of({"holder": holder, "other": other})
        router.expect(key(), "holder")
        assert router.ranked(key())[0] == best


def test_a_few_common_words_are_no_reason_to_queue() -> None:
    for common, best in ((4, "idle"), (5, "holder")):
        router = router_of({"holder": 2, "idle": 0})
        router.expect(key(blocks=common), "holder")
        assert router.ranked(key())[0] == best


def test_less_loaded_of_two_equal_replicas_is_picked() -> None:
    router = router_of({"busy": 3, "idle": 2})
    for name in ("busy", "idle"):
        router.expect(key(), name)
    assert router.ranked(key())[0] == "idle"
    equal = router_of({"one": 1, "two": 1})
    assert {equal.ranked(key())[0] for _ in range(50)} == {"one", "two"}


def test_request_goes_where_its_model_is_loaded() -> None:
    router = router_of({"loaded": 5})
    router.report("other", loaded(models=["another"]))
    assert router.ranked(key())[0] == "loaded"
    router.report("loaded", loaded(50))
    assert router.ranked(key())[0] == "other", "it can load the model as well"
    router.report("loaded", loaded(models=["a", "b"]))
    assert router.ranked(key())[0] == "other", "it has fewer models"


def test_replica_is_expected_to_have_the_model_that_it_was_asked_for() -> None:
    clock = Clock()
    router = router_of({}, clock=clock)
    for name in ("one", "two"):
        router.report(name, loaded(models=()))
    first = router.choose(key("a"))
    assert [router.choose(key(name)) for name in "bcd"] == [first] * 3
    other = router.choose(key("e", model="another"))
    assert other != first, "the other has nothing yet"
    clock.now = 60.0
    for name in ("one", "two"):
        router.report(name, loaded(models=()))
        router.finished(name, 10)
    assert {router.ranked(key(str(n)))[0] for n in range(50)} == {"one", "two"}, "the model never came"


def test_models_that_clients_make_up_are_forgotten() -> None:
    router = router_of({"one": 0})
    for n in range(1000):
        router.choose(key(str(n), model=f"made up {n}"))
    assert len(router._with_model) <= 66


def test_replica_whose_engine_restarts_comes_last() -> None:
    router = router_of({"restarting": 0, "ready": 50})
    router.expect(key(), "restarting")
    router.report("restarting", Report(models=frozenset({MODEL}), num_models=1, is_ready=False))
    assert router.ranked(key()) == ["ready", "restarting"]
    router.remove("ready")
    assert router.choose(key()) == "restarting"
    router.remove("restarting")
    assert router.choose(key()) is None


def test_prefixes_that_replicas_report_are_found_and_those_they_dropped_are_not() -> None:
    router = router_of({"one": 0, "two": 0})
    router.report("two", loaded(held=prompt("p")))
    assert {router.ranked(key())[0] for _ in range(20)} == {"two"}
    router.report("two", Report(models=frozenset({MODEL}), num_models=1, dropped=latest(prompt("p"))))
    assert {router.ranked(key())[0] for _ in range(50)} == {"one", "two"}


def test_requests_that_were_lost_on_the_way_do_not_count_for_ever() -> None:
    router = router_of({"one": 0})
    for _ in range(5):
        router.choose(key())
    assert router.load("one") == 5
    router.report("one", loaded(0))
    assert router.load("one") == 5, "the report may be older than they are"
    router.report("one", loaded(2))
    assert router.load("one") == 5, "it says nothing of those sent before the last report"
    router.report("one", loaded(2))
    assert router.load("one") == 2


def test_requests_are_expected_to_end_as_fast_as_before_the_last_report() -> None:
    clock = Clock()
    router = router_of({"one": 0}, clock=clock)
    for _ in range(10):
        router.choose(key())
    clock.now = 1.0
    router.report("one", loaded(4), num_ended=6)
    assert router.load("one") == 4
    for _ in range(6):
        router.choose(key())
    assert router.load("one") == 10
    clock.now = 1.5
    assert router.load("one") == 7
    clock.now = 100.0
    assert router.load("one") == 4, "what is known, if reports stop"
    router.report("one", loaded(10), num_ended=6)
    assert router.load("one") == 10


def test_count_that_starts_again_ends_no_request_twice_and_starts_none() -> None:
    """The difference was negative, so the load grew by as many requests as had ended before."""
    clock = Clock()
    router = router_of({"one": 2}, clock=clock)
    for clock.now, num_ended in ((0.25, 500), (0.5, 1), (0.75, 1)):
        router.report("one", loaded(2), num_ended)
    clock.now = 1.0
    assert router.load("one") == 2


def test_only_new_parts_of_a_report_are_read() -> None:
    index = PrefixIndex()
    router = router_of({"one": 0, "two": 0}, index=index)
    old, new = prompt("p"), prompt("q")
    router.report("one", loaded(held=old))
    router.report("two", loaded(held=old))
    for name, prefixes in (("one", [*old, *new]), ("two", [*old[:3], *new])):
        router.report(name, Report(models=frozenset({MODEL}), held=latest(prefixes, 20)))
        router.report(name, Report(models=frozenset({MODEL}), held=latest(prefixes, 20)))
    assert index.matches(old, {"one", "two"}) == {"one": 10, "two": 10}
    assert list(index.matches(old, {"one", "two"})) == ["two", "one"], "the last to report it, once"
    assert index.matches(new, {"one", "two"}) == {"one": 10, "two": 10}
    router.report("one", Report(models=frozenset({MODEL}), held=latest(old[:1], 1)))
    assert next(iter(index.matches(old[:1], {"one", "two"}))) == "one", "it started to count again"


def test_first_reports_of_many_replicas_leave_room_for_what_comes() -> None:
    """Above 512 replicas, what one reported pushed out what another had."""
    index = PrefixIndex(1024)
    router = router_of({}, index=index)
    for n in range(64):
        router.add(str(n))
    kept = key("kept")
    router.expect(kept, "7")
    for n in range(64):
        router.report(str(n), loaded(held=[f"{n:04}{each:04}".encode() for each in range(100)]))
    assert len(index) <= 1024 // 2 + len(kept.blocks)
    assert router.ranked(kept)[0] == "7"
    for n in range(64):
        assert index.matches([f"{n:04}0099".encode()], {str(n)}), "the latest of each"


def test_only_the_first_report_is_limited_by_the_number_of_replicas() -> None:
    """Every report was, so that 10,000 replicas reported new prompts in vain."""
    before, later = prompt("b", 40), [prompt(name, 40) for name in "pqrs"]
    index = PrefixIndex(1 << 18)
    router = router_of({}, index=index)
    for n in range(10_000):
        router.add(str(n))
    ends_first = [block for each in (before, *later) for block in reversed(each)]
    router.report("7", loaded(held=ends_first[:40]))
    router.report("7", loaded(held=ends_first))
    assert index.matches(before[:13], {"7"}) == {"7": 13}
    assert index.matches([before[13]], {"7"}) == {}
    for each in later:
        assert index.matches(each, {"7"}) == {"7": 40}
        assert router.ranked(Key(MODEL, each, 40))[0] == "7"


def test_report_survives_as_builtins() -> None:
    """Serve's controller could not unpickle a class of ours where the package is not installed."""
    report = Report(load=3, models=frozenset({"b", "a"}), num_models=2, held=latest(prompt("p")), is_ready=False)
    told = report.to_builtins()
    assert told == {
        "load": 3,
        "models": ["a", "b"],
        "num_models": 2,
        "is_ready": False,
        "held": {"digests": b"".join(prompt("p")), "num_ever": 10},
        "dropped": {"digests": b"", "num_ever": 0},
    }
    assert b"ostro" not in pickle.dumps(told)
    assert Report.from_builtins(told) == report
    assert Report.from_builtins({}) == Report()


def test_load_spreads_over_many_replicas_though_each_choice_sees_only_a_few() -> None:
    router = router_of({str(n): 0 for n in range(1000)})
    for n in range(10_000):
        router.choose(key(f"own {n}", blocks=2, num_history=2))
    loads = [router.load(str(n)) for n in range(1000)]
    assert sum(loads) == 10_000
    assert max(loads) <= 14
    assert min(loads) >= 6


def test_holders_of_a_common_prefix_spill_over_before_they_are_overrun() -> None:
    router = router_of({str(n): 0 for n in range(1000)})
    for _ in range(10_000):
        router.choose(key("the same for all"))
    assert max(router.load(str(n)) for n in range(1000)) <= 30


@given(
    loads=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 40), min_size=1),
    holder=st.sampled_from("abcd"),
    held=st.integers(0, 10),
)
def test_holder_is_preferred_unless_it_is_overloaded(loads: dict[str, int], holder: str, held: int) -> None:
    router = router_of(loads)
    router.report(holder, loaded(loads.get(holder, 0), held=prompt("p")[:held]))
    loads.setdefault(holder, 0)
    best, least = router.ranked(key())[0], min(loads.values())
    if held >= 5 and loads[holder] <= 1.5 * least + 8:
        assert best == holder
    else:
        assert loads[best] == least


class Fleet(RuleBasedStateMachine):
    """Replicas come, go, restart and report in any order while requests are sent."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex(64)
        self.router = router_of({}, index=self.index)
        self.ready: dict[str, bool] = {}
        self.most_open: dict[str, int] = {}

    @rule(name=st.sampled_from("abcdefgh"))
    def add(self, name: str) -> None:
        self.router.add(name)
        self.ready.setdefault(name, True)

    @rule(name=st.sampled_from("abcdefgh"))
    def remove(self, name: str) -> None:
        self.router.remove(name)
        self.ready.pop(name, None)
        self.most_open.pop(name, None)

    @rule(
        name=st.sampled_from("abcdefgh"),
        load=st.integers(0, 20),
        is_ready=st.booleans(),
        models=st.frozensets(st.sampled_from(["x", "y", MODEL])),
        held=st.integers(0, 6),
        dropped=st.integers(0, 6),
        num_ever=st.integers(0, 20),
    )
    def report(
        self, name: str, load: int, is_ready: bool, models: frozenset[str], held: int, dropped: int, num_ever: int
    ) -> None:
        self.router.report(
            name,
            Report(
                load=load,
                models=models,
                num_models=len(models),
                is_ready=is_ready,
                held=latest(prompt("p", held), num_ever),
                dropped=latest(prompt("p")[dropped:], num_ever),
            ),
        )
        self.ready[name] = is_ready
        self.most_open[name] = max(self.most_open.get(name, 0), load)

    @rule(name=st.sampled_from("pq"), blocks=st.integers(0, 40), model=st.sampled_from(["x", "y", MODEL, "unheard of"]))
    def choose(self, name: str, blocks: int, model: str) -> None:
        best = self.router.choose(key(name, model=model, blocks=blocks, num_history=blocks))
        if not self.ready:
            assert best is None
            return
        assert best is not None
        assert best in self.ready
        assert self.ready[best] or not any(self.ready.values())
        self.most_open[best] = self.most_open.get(best, 0) + 1

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), count=st.integers(1, 5))
    def finish(self, data: st.DataObject, count: int) -> None:
        self.router.finished(data.draw(st.sampled_from(sorted(self.ready))), count)

    @invariant()
    def remembers_what_is_there_and_no_more(self) -> None:
        assert len(self.router) == len(self.ready)
        assert all(name in self.router for name in self.ready)
        assert len(self.index) <= 64
        for name in self.ready:
            assert 0 <= self.router.load(name) <= self.most_open.get(name, 0)


TestFleet = Fleet.TestCase
