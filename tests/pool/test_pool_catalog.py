import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from pool_world import a_spec, until

from ostro.errors import BadRequest, DownloadFailed, ModelNotFound
from ostro.pool.catalog import Catalog, ModelSpec


class Roots:
    """Places that hold models, and fail, and are slow, as told."""

    def __init__(self, **holds: Sequence[str]) -> None:
        self.holds = {root: list(names) for root, names in holds.items()}
        self.bases: dict[str, str] = {}
        self.pinned: set[str] = set()
        self.errors: dict[str, Exception] = {}
        self.slow: dict[str, threading.Event] = {}
        self.looks = 0
        self.gate = threading.Event()
        self.gate.set()

    def list(self, root: str) -> list[ModelSpec]:
        assert threading.current_thread() is not threading.main_thread(), "the event loop would stand still"
        self.looks += 1
        self.gate.wait(10)
        if root in self.slow:
            self.slow[root].wait(10)
        if root in self.errors:
            raise self.errors[root]
        return [
            a_spec(name, place=root, base=self.bases.get(name), pinned=name in self.pinned) for name in self.holds[root]
        ]

    def catalog(self, *fixed: ModelSpec, refresh_seconds: float = 0.0, list_seconds: float = 10.0) -> Catalog:
        return Catalog(
            fixed,
            roots=list(self.holds),
            make=self._make,
            list_models=self.list,
            refresh_seconds=refresh_seconds,
            list_seconds=list_seconds,
        )

    def _make(self, found: ModelSpec) -> ModelSpec:
        if found.name == "bad":
            raise BadRequest("No such setting.")
        if found.name == "odd":
            raise TypeError("'<' not supported")
        return found


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def names(catalog: Catalog) -> list[str]:
    return [spec.name for spec in catalog.specs()]


@in_loop
async def test_fixed_models_come_first_then_found_ones_by_name() -> None:
    catalog = Roots(one=["m", "b"], two=["z", "a"]).catalog(a_spec("x"), a_spec("b"))
    assert catalog.default == a_spec("x")
    assert names(catalog) == ["x", "b"]
    await catalog.refresh()
    assert names(catalog) == ["x", "b", "a", "m", "z"]
    # What was named at the start wins over what is found; what is found first over what is found later.
    assert (await catalog.find("b")).config.model == "./b"
    assert (await catalog.find("m")).config.model == "one/m"


@in_loop
async def test_known_name_is_found_without_a_look() -> None:
    roots = Roots(one=["m"])
    catalog = roots.catalog(a_spec("org-x"))
    assert (await catalog.find("org/x")).name == "org-x"
    assert roots.looks == 0


@in_loop
async def test_new_model_is_found_on_a_miss() -> None:
    roots = Roots(one=["m"])
    catalog = roots.catalog()
    with pytest.raises(ModelNotFound):
        await catalog.find("new")
    roots.holds["one"].append("new")
    assert (await catalog.find("new")).config.model == "one/new"
    roots.holds["one"].remove("m")
    await catalog.refresh()
    with pytest.raises(ModelNotFound):
        await catalog.find("m")


@in_loop
async def test_misses_do_not_look_again_and_again() -> None:
    roots = Roots(one=["m"])
    catalog = roots.catalog(refresh_seconds=60.0)
    for _ in range(20):
        with pytest.raises(ModelNotFound):
            await catalog.find("none")
    assert roots.looks == 1


@in_loop
async def test_names_that_could_not_be_a_models_cause_no_look() -> None:
    roots = Roots(one=["m"])
    roots.errors["one"] = OSError("down")
    catalog = roots.catalog()
    for name in ("../m", "a/b/c", "x" * 5000, ""):
        with pytest.raises(ModelNotFound) as raised:
            await catalog.find(name)
        assert len(str(raised.value)) < 400
    assert roots.looks == 0


@in_loop
async def test_many_misses_share_one_look_which_outlives_each_of_them() -> None:
    roots = Roots(one=["m"])
    roots.gate.clear()
    catalog = roots.catalog(refresh_seconds=60.0)
    finds = [asyncio.create_task(catalog.find("m")) for _ in range(20)]
    await asyncio.sleep(0.05)
    finds[0].cancel()
    roots.gate.set()
    found = await asyncio.gather(*finds, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert {spec.name for spec in found[1:] if isinstance(spec, ModelSpec)} == {"m"}
    assert roots.looks == 1


@in_loop
async def test_root_that_cannot_be_listed_hides_nothing() -> None:
    roots = Roots(one=["m"], two=["n"])
    catalog = roots.catalog()
    await catalog.refresh()
    roots.errors["one"] = DownloadFailed("The bucket does not answer. Try again later.")
    roots.holds["two"].append("new")
    assert (await catalog.find("new")).name == "new"
    assert (await catalog.find("m")).name == "m"
    for _ in range(3):
        with pytest.raises(DownloadFailed, match="bucket does not answer"):
            await catalog.find("none")
    del roots.errors["one"]
    with pytest.raises(ModelNotFound):
        await catalog.find("none")


@in_loop
async def test_unexpected_error_of_a_root_is_reported_without_its_details() -> None:
    roots = Roots(one=[])
    roots.errors["one"] = PermissionError("/secret/place")
    with pytest.raises(DownloadFailed, match="PermissionError") as raised:
        await roots.catalog().find("m")
    assert "secret" not in str(raised.value)


@in_loop
async def test_unfit_entries_of_a_root_hide_no_others() -> None:
    """A setting of a wrong type, which nobody had foreseen, removed all models of its root."""
    catalog = Roots(one=["..", "a b", "bad", "odd", "m"]).catalog()
    await catalog.refresh()
    assert names(catalog) == ["m"]


@in_loop
async def test_error_names_near_models_and_not_all_of_them() -> None:
    catalog = Roots(one=[f"model-{number}" for number in range(100)] + ["llama-7b"]).catalog()
    with pytest.raises(ModelNotFound, match=r"no model 'llama-8b'.*one of these: llama-7b, .*96 others") as raised:
        await catalog.find("llama-8b")
    assert str(raised.value).count("model-") == 4
    with pytest.raises(ModelNotFound, match="No models are known"):
        await Roots(one=[]).catalog().find("m")


@in_loop
async def test_root_that_does_not_answer_keeps_nobody_waiting_for_long() -> None:
    """A bucket that stalled held up the list of models, and the end of the server."""
    roots = Roots(one=["m"], two=["n"])
    roots.gate.clear()
    catalog = roots.catalog(a_spec("x"), refresh_seconds=60.0, list_seconds=0.2)
    await catalog.refresh_if_old(wait_seconds=0.01)
    assert names(catalog) == ["x"]
    with pytest.raises(DownloadFailed, match="TimeoutError"):
        await catalog.find("m")
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("list "))
    # What is told late counts all the same, and it was asked for once.
    roots.gate.set()
    await until(lambda: catalog.is_whole)
    assert names(catalog) == ["x", "m", "n"]
    assert roots.looks == 2


@in_loop
async def test_slow_root_does_not_hide_what_others_hold() -> None:
    roots = Roots(fast=["a"], slow=["b"])
    catalog = roots.catalog(list_seconds=5.0)
    slow = threading.Event()
    roots.slow["slow"] = slow
    await catalog.refresh_if_old(wait_seconds=0.5)
    assert names(catalog) == ["a"]
    slow.set()
    assert (await catalog.find("b")).name == "b"


@in_loop
async def test_close_gives_up_on_a_look() -> None:
    roots = Roots(one=["m"])
    roots.gate.clear()
    catalog = roots.catalog()
    looking = asyncio.create_task(catalog.refresh())
    await asyncio.sleep(0.05)
    catalog.close()
    await looking
    roots.gate.set()


@in_loop
async def test_name_in_two_roots_is_logged_once() -> None:
    catalog = Roots(one=["m", "a"], two=["m", "b"]).catalog()
    log = logging.getLogger("ostro.pool.catalog")
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        await catalog.refresh()
        await catalog.refresh()
    finally:
        log.removeHandler(handler)
    assert told == ["m under two is not served: an earlier root has a model of that name."]
    assert (await catalog.find("m")).config.model == "one/m"


@pytest.mark.full
@in_loop
async def test_misses_among_many_models_are_reported_soon() -> None:
    """Every name was compared with the wrong one: half a second for thousands, in which nobody else was served. So many
    misses took minutes.
    """
    catalog = Roots(one=[f"organisation-{n % 50}/some-model-{n}-instruct" for n in range(20_000)]).catalog(
        refresh_seconds=60.0
    )
    await catalog.refresh()
    for number in range(200):
        with pytest.raises(ModelNotFound, match="organisation-7/some-model-7007-instruct"):
            await catalog.find(f"organisation-7/some-model-7007-instruc{'t' * (2 + number % 50)}")


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(BadRequest, match="Two models are called 'a'"):
        Roots().catalog(a_spec("a"), a_spec("b"), a_spec("a"))
    assert Roots().catalog().default is None


class Told(logging.Handler):
    """What the catalog says in the log while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "Told":
        logging.getLogger("ostro.pool.catalog").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ostro.pool.catalog").removeHandler(self)


@in_loop
async def test_adapters_of_a_root_sit_on_models_beside_them_or_named_at_the_start() -> None:
    roots = Roots(one=["org/tiny", "french", "german", "latin"], two=["other", "greek"])
    roots.bases = {"french": "org-tiny", "german": "/train/org/tiny/", "latin": "gs://someone/x", "greek": "x"}
    catalog = roots.catalog(a_spec("x", adapters=["given"]), a_spec("given", base="x"))
    await catalog.refresh()
    await catalog.refresh()
    assert names(catalog) == ["x", "given", "french", "german", "greek", "latin", "org/tiny", "other"]
    specs = {spec.name: spec for spec in catalog.specs()}
    assert {name: spec.base for name, spec in specs.items() if spec.base} == {
        "given": "x",
        "french": "org/tiny",
        "german": "org/tiny",
        "latin": "x",
        "greek": "x",
    }
    assert specs["org/tiny"].config.adapters == (("french", "one/french"), ("german", "one/german"))
    assert specs["x"].config.adapters == (("given", "./given"), ("latin", "one/latin"), ("greek", "two/greek"))
    assert (specs["x"].config.model, specs["other"].config.adapters) == ("./x", ())
    assert (specs["latin"].adapter, specs["latin"].config) == ("latin", specs["x"].config)


@in_loop
async def test_adapter_without_its_base_is_left_out_and_logged_once() -> None:
    roots = Roots(one=["tiny", "a-b/c", "a/b-c", "lost", "upper", "either", "french"], two=["tiny", "german"])
    roots.bases = {"lost": "org/large", "french": "tiny", "upper": "french", "either": "a-b-c", "german": "tiny"}
    catalog = roots.catalog()
    with Told() as told:
        await catalog.refresh()
        await catalog.refresh()
    assert names(catalog) == ["a-b/c", "a/b-c", "french", "tiny"]
    beside = "but there is no such model next to it or named at startup."
    assert sorted(line.partition(" Add that")[0] for line in told.lines) == [
        "either under one is not served: 'a-b-c' could be 'a/b-c' or 'a-b/c'. Ask for one of them by its own name.",
        # That of the other place is served under this name, and may be quite another.
        f"german under two is not served: it is an adapter of 'tiny', {beside}",
        f"lost under one is not served: it is an adapter of 'org/large', {beside}",
        "tiny under two is not served: an earlier root has a model of that name.",
        f"upper under one is not served: it is an adapter of 'french', {beside}",
    ]
    roots.holds["one"].append("org-large")
    await catalog.refresh()
    assert (await catalog.find("lost")).base == "org-large"


@in_loop
async def test_pinned_adapter_pins_its_base() -> None:
    roots = Roots(one=["tiny", "french", "german"])
    roots.bases, roots.pinned = {"french": "tiny", "german": "tiny"}, {"german"}
    catalog = roots.catalog()
    await catalog.refresh()
    assert (await catalog.find("tiny")).pinned


@in_loop
async def test_first_of_two_models_with_one_name_in_a_root_is_served() -> None:
    roots = Roots(one=["m", "m"])
    catalog = roots.catalog()
    with Told() as told:
        await catalog.refresh()
    assert told.lines == ["m under one is not served: there is another one with that name. Rename one."]
