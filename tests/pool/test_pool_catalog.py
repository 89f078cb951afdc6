import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from pool_world import a_spec

from ostro.errors import BadRequest, DownloadFailed, ModelNotFound
from ostro.pool.catalog import Catalog, ModelSpec


class Roots:
    """Places that hold models, and fail, and are slow, as told."""

    def __init__(self, **holds: Sequence[str]) -> None:
        self.holds = {root: list(names) for root, names in holds.items()}
        self.errors: dict[str, Exception] = {}
        self.looks = 0
        self.gate = threading.Event()
        self.gate.set()

    def list(self, root: str) -> list[tuple[str, str]]:
        assert threading.current_thread() is not threading.main_thread(), "the event loop would stand still"
        self.looks += 1
        self.gate.wait(10)
        if root in self.errors:
            raise self.errors[root]
        return [(name, f"{root}/{name}") for name in self.holds[root]]

    def catalog(self, *fixed: ModelSpec, refresh_seconds: float = 0.0) -> Catalog:
        return Catalog(
            fixed, roots=list(self.holds), make=self._make, list_models=self.list, refresh_seconds=refresh_seconds
        )

    def _make(self, name: str, reference: str) -> ModelSpec:
        if name == "bad":
            raise BadRequest("No such setting.")
        spec = a_spec(name)
        return ModelSpec(name=name, config=type(spec.config)(model=reference))


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
async def test_unforeseen_error_of_a_root_is_told_without_its_details() -> None:
    roots = Roots(one=[])
    roots.errors["one"] = PermissionError("/secret/place")
    with pytest.raises(DownloadFailed, match="PermissionError") as raised:
        await roots.catalog().find("m")
    assert "secret" not in str(raised.value)


@in_loop
async def test_unfit_entries_of_a_root_hide_no_others() -> None:
    catalog = Roots(one=["..", "a b", "bad", "m"]).catalog()
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


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(BadRequest, match="Two models are called 'a'"):
        Roots().catalog(a_spec("a"), a_spec("b"), a_spec("a"))
    assert Roots().catalog().default is None
