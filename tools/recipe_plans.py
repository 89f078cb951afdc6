"""Writes what `ostro plan` says into the recipes: `python tools/recipe_plans.py`. Run it after a change of a recipe's
config or settings, or of planning. Everything else in a recipe is written by hand.
"""

import re
from pathlib import Path

import msgspec

from ostro.formats.yaml_file import read_yaml
from ostro.recipes.devices import DEVICES
from ostro.recipes.planned import planned
from ostro.recipes.recipe import Expectation, Recipe
from ostro.recipes.shelf import SHELF

_PLAN = re.compile(r"^    plan: .*$", re.MULTILINE)
_ANY = Expectation(runs_on="", weights=0, page=0, pages=0, page_tokens=1, total=0, longest=0, at_a_time=0)


def write(path: Path) -> bool:
    """Whether the recipe changed."""
    raw = read_yaml(path)
    assert isinstance(raw, dict)
    # A new recipe may have no plans yet.
    raw["setups"] = [each | {"plan": msgspec.to_builtins(_ANY)} for each in raw["setups"]]
    recipe = msgspec.convert(raw, Recipe)
    checkpoint = recipe.checkpoint
    plans = iter([planned(checkpoint, DEVICES[each.device], each.settings)[0] for each in recipe.setups])
    text = path.read_text(encoding="utf-8")
    filled = _PLAN.sub(lambda _: f"    plan: {_flow(next(plans))}", text)
    path.write_text(filled, encoding="utf-8")
    return filled != text


def _flow(plan: Expectation) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in msgspec.to_builtins(plan).items()) + "}"


if __name__ == "__main__":
    for recipe_file in sorted(SHELF.glob("*.yaml")):
        if write(recipe_file):
            print(f"wrote {recipe_file.name}")
