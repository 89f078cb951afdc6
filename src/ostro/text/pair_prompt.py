"""The text that a chat template puts around two texts, so that it need not run for each pair of them.

    template, with stand-ins for both      before QUERY between DOCUMENT after

Knows renderers; knows no tokens.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, Unpack

from ostro.errors import UnsupportedModel
from ostro.text.chat import Message, RenderOptions
from ostro.text.renderer import Renderer


class PairPrompt(NamedTuple):
    before: str
    between: str
    after: str


def pair_prompt(
    renderer: Renderer, messages: Callable[[str, str], Sequence[Message]], **options: Unpack[RenderOptions]
) -> PairPrompt:
    """`messages` makes a conversation of two texts. Raises UnsupportedModel for a template that shows one of them
    changed, more than once or not at all, or the second before the first. Blocks on the process that renders.
    """
    # The spaces show whether it strips texts.
    first, second = (f" {secrets.token_hex(8)} " for _ in range(2))
    text = renderer.render(messages(first, second), **options)
    if text.count(first.strip()) != 1 or text.count(second.strip()) != 1:
        raise UnsupportedModel("Its chat template does not show a query and a document once each, as ranking needs.")
    before, found, rest = text.partition(first)
    between, also_found, after = rest.partition(second)
    if not found or not also_found:
        raise UnsupportedModel("Its chat template changes a query or a document, or shows the document first.")
    return PairPrompt(before, between, after)
