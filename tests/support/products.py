"""Which cases of a test with parameters `make test` runs: of a product, as many as have each value once; of a test with
the mark `cases`, as many as that says. The others are `full`.
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest

_ELSEWHERE = ("full", "slow", "gpu")
Value = tuple[object, ...]
"""A parameter's name or names, and the identity of a value."""


def mark_products(items: Iterable[pytest.Item]) -> None:
    """Marks the cases of each test with several parameters that repeat values which others have."""
    for cases in _by_test(items):
        _mark_others(cases, _each_value_once([_values(case) for case in cases]))


def mark_cases(items: Iterable[pytest.Item]) -> None:
    """Marks the cases that a test with the mark `cases` has beyond its number; those left are evenly spaced."""
    for cases in _by_test(items):
        if mark := cases[0].get_closest_marker("cases"):
            [number] = mark.args
            _mark_others(cases, {index * len(cases) // number for index in range(number)})


def _by_test(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Function]]:
    """Cases of each test, but for those that are marked as run elsewhere."""
    tests: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        if not any(item.get_closest_marker(name) for name in _ELSEWHERE):
            tests[item.parent, item.originalname].append(item)
    return tests.values()


def _mark_others(cases: list[pytest.Function], chosen: set[int]) -> None:
    for index, case in enumerate(cases):
        if index not in chosen:
            case.add_marker("full")


def _values(case: pytest.Function) -> set[Value]:
    """One for each `parametrize`."""
    found: set[Value] = set()
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        listed = names.replace(" ", "").split(",") if isinstance(names, str) else names
        found.add((*listed, *(id(case.callspec.params[name]) for name in listed)))
    return found


def _each_value_once(cases: list[set[Value]]) -> set[int]:
    """The first of the cases that have the most values that none before has, and so on."""
    chosen: set[int] = set()
    missing = set[Value]().union(*cases)
    while missing:
        best = max(range(len(cases)), key=lambda index: len(cases[index] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen
