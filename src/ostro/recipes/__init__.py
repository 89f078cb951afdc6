"""Recipes: for popular models, what to start them with on which device, and what to expect.

recipe    one recipe, read from YAML and validated
shelf     the recipes that Ostro ships, by name
devices   the devices that they name
planned   the plan of a recipe's model on one of them, from which the recipe's own figures come
words     what a recipe says, as text
"""

from ostro.recipes.devices import DEVICES, NamedDevice
from ostro.recipes.recipe import Expectation, Measured, Recipe, Setup, read_recipe
from ostro.recipes.shelf import find_recipe, recipe_names, recipes

__all__ = [
    "DEVICES",
    "Expectation",
    "Measured",
    "NamedDevice",
    "Recipe",
    "Setup",
    "find_recipe",
    "read_recipe",
    "recipe_names",
    "recipes",
]
