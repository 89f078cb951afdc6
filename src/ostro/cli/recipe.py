"""ostro recipe: what to start a popular model with on which device, and what to expect. Loads and downloads nothing."""

import argparse
import json
import textwrap
from collections.abc import Iterator

import msgspec

from ostro.cli.parser import describe
from ostro.errors import BadRequest
from ostro.recipes import DEVICES, Recipe, find_recipe, recipes
from ostro.recipes.recipe import as_json
from ostro.recipes.words import expected, measured, sampling

_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="RECIPE", help="a recipe's name, or its model's Hub id (default: list all recipes)"
    )
    parser.add_argument("--device", metavar="|".join(DEVICES), choices=DEVICES, help="show this device's command only")
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    describe(
        parser,
        {
            "ostro recipe": "list the recipes",
            "ostro recipe qwen3-8b": "the command for each device, and what to expect",
            "ostro recipe qwen3-8b --device rtx-4090": "for one device only",
        },
        "`ostro plan` says the same of any model, on this machine or on another one.",
    )


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        found = [each for each in recipes().values() if args.device is None or each.setup(args.device) is not None]
        print(json.dumps([as_json(each) for each in found], indent=2) if args.json else _list(found))
        return 0
    recipe = find_recipe(args.name)
    setups = [each for each in recipe.setups if args.device in (None, each.device)]
    if not setups:
        raise BadRequest(_without(recipe, args.device), param="device")
    shown = msgspec.structs.replace(recipe, setups=setups)
    print(json.dumps(as_json(shown), indent=2) if args.json else "\n".join(_page(shown)))
    return 0


def _without(recipe: Recipe, device: str) -> str:
    known = ", ".join(each.device for each in recipe.setups)
    if device in recipe.too_large_for:
        return f"{recipe.name} does not fit on {device}. The recipe has {known}."
    return (
        f"The recipe {recipe.name} has no setup for {device}, because a smaller device will do. The recipe has {known}."
    )


def _list(found: list[Recipe]) -> str:
    rows = [("RECIPE", "MODEL", "LICENCE", "DEVICES")]
    rows += [(each.name, each.model, each.licence, " ".join(setup.device for setup in each.setups)) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _page(recipe: Recipe) -> Iterator[str]:
    yield f"{recipe.title} ({recipe.upstream}, {recipe.licence})"
    for setup in recipe.setups:
        yield ""
        yield f"{DEVICES[setup.device].label}:"
        yield f"  {recipe.command(setup)}"
        yield from _wrapped("  ", expected(setup.plan))
    yield ""
    rows = {
        "sampling": sampling(recipe),
        "tools": f"--tool-format {recipe.tools} (found from the chat template)",
        "reasoning": recipe.reasoning or "none",
        "measured": "; ".join(map(measured, recipe.measured)) or "not measured",
    }
    for label, text in rows.items():
        yield from _wrapped(f"{label + ':':<11}", text)
    if recipe.too_large_for:
        yield from _wrapped("too large for: ", ", ".join(DEVICES[each].label for each in recipe.too_large_for))
    for note in recipe.notes:
        yield from _wrapped("note:      ", note)


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=label, subsequent_indent=" " * len(label))
