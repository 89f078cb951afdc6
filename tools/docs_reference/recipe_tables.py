"""The recipes as a table of models by devices, and a section for each."""

from docs_reference.markup import code, table
from ostro.recipes import DEVICES, Recipe, recipes
from ostro.recipes.devices import STANDARD
from ostro.recipes.words import gib, measured, sampling, sequences


def parts() -> dict[str, str]:
    return {
        "recipes": _overview(),
        "recipe-devices": table(
            ("device", "", "`ostro plan` with"),
            [(code(each.name), each.label, code(each.options)) for each in DEVICES.values()],
        ),
        "recipe-sections": "\n".join(map(_section, recipes().values())),
    }


def _overview() -> str:
    shown = [DEVICES[name] for name in STANDARD]
    rows = [
        (f"[{recipe.title}](#{_anchor(recipe)})", code(recipe.name), *(_fit(recipe, each.name) for each in shown))
        for recipe in recipes().values()
    ]
    return table(("model", "recipe", *(each.label for each in shown)), rows)


def _fit(recipe: Recipe, device: str) -> str:
    """What the model takes there, in which format."""
    setup = recipe.setup(device)
    if setup is None:
        return "–"
    how = f" {setup.settings['quantize']}" if "quantize" in setup.settings else ""
    return f"{gib(setup.plan.weights)}{how}"


def _anchor(recipe: Recipe) -> str:
    return "recipe-" + recipe.name.replace(".", "-")


def _section(recipe: Recipe) -> str:
    rows = [
        (
            DEVICES[setup.device].label,
            code(recipe.command(setup)),
            gib(setup.plan.weights),
            gib(setup.plan.total),
            f"{setup.plan.longest:,}",
            sequences(setup.plan.sequences(min(2048, setup.plan.longest))),
        )
        for setup in recipe.setups
    ]
    told = [
        f"Sampling: {sampling(recipe)}.",
        f"Tools: `{recipe.tools}`.",
        f"Reasoning: {(recipe.reasoning or 'none').replace('<', '&lt;')}.",
        f"Measured: {'; '.join(map(measured, recipe.measured))}." if recipe.measured else "Not measured.",
        *recipe.notes,
    ]
    if recipe.too_large_for:
        told.append(f"Too large for: {'; '.join(DEVICES[each].label for each in recipe.too_large_for)}.")
    head = ("on", "command", "weights", "in all", "longest", "of 2,048 tokens at a time")
    return (
        f'<a id="{_anchor(recipe)}"></a>\n\n### {recipe.title}\n\n'
        f"`{recipe.upstream}`, {recipe.licence}. Config: {recipe.config_source}.\n\n{table(head, rows)}\n"
        + "".join(f"- {line}\n" for line in told)
    )
