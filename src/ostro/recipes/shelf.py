"""The recipes that Ostro ships, by name. Listing names reads no recipe."""

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ostro.errors import BadRequest
from ostro.recipes.recipe import Recipe, read_recipe

SHELF = Path(__file__).with_name("models")
_MOST_NAMED = 3


def recipe_names() -> list[str]:
    return sorted(path.stem for path in SHELF.glob("*.yaml"))


@cache
def recipes() -> Mapping[str, Recipe]:
    """All of them, by name."""
    return {name: read_recipe(SHELF / f"{name}.yaml") for name in recipe_names()}


def find_recipe(wanted: str) -> Recipe:
    """By name, or by the model's Hub id or short name, in upper or lower case. Raises BadRequest with the nearest names
    if there is none.
    """
    names, text = recipe_names(), wanted.lower()
    if text in names:
        return read_recipe(SHELF / f"{text}.yaml")
    for recipe in recipes().values():
        if text in (recipe.upstream.lower(), recipe.model.lower()):
            return recipe
    last = text.rpartition("/")[2]
    begun = [name for name in names if len(last) > 1 and name.startswith(last)]
    near = (begun or difflib.get_close_matches(last, names, n=_MOST_NAMED))[:_MOST_NAMED]
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise BadRequest(f"There is no recipe {wanted!r}. {meant}`ostro recipe` lists them.", param="name")
