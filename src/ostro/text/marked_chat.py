"""Renders a conversation and marks every control text that comes from its messages. See control_text.py for the idea.

Knows templates and control texts; knows no tokens, no ids.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack, cast

from ostro.text.chat import Message, RenderOptions, Tools
from ostro.text.control_text import ControlTexts, Marker
from ostro.text.jinja_template import JinjaTemplate

# Messages in these roles are untrusted; system texts and earlier answers come from the application.
_OUTSIDE_ROLES = frozenset({"user", "tool", "function"})


def render_guarded(
    template: JinjaTemplate,
    messages: Sequence[Message],
    *,
    controls: ControlTexts,
    guarded: ControlTexts,
    mark: str,
    **options: Unpack[RenderOptions],
) -> str:
    """The conversation's text, with the mark before every control text that comes from a message, tool or variable.

    `controls` are marked in all messages. `guarded` also has the template's other markers, which are marked only in the
    messages of users and tools: an answer's own <think> is part of the conversation.
    """

    def marked(way: Callable[[ControlTexts, str, str], str]) -> tuple[list[Message], RenderOptions, bool]:
        inside = Marker(lambda text: way(controls, text, mark))
        outside = Marker(lambda text: way(guarded, text, mark))
        turns = [(outside if message.get("role") in _OUTSIDE_ROLES else inside)(message) for message in messages]
        others: RenderOptions = {
            **options,
            "tools": cast(Tools | None, inside(options.get("tools"))),
            "template_kwargs": cast(Mapping[str, object] | None, inside(options.get("template_kwargs"))),
        }
        return cast(list[Message], turns), others, inside.marked_any or outside.marked_any

    turns, others, _ = marked(ControlTexts.marked)
    rendered = template.render(turns, **others)
    # A template may also join or cut texts into a control text that no message holds. With the mark at every place
    # where one could begin, that is impossible; if both renderings have the same markers, it did not happen.
    turns, others, possible = marked(ControlTexts.marked_everywhere)
    if not possible:
        return rendered
    strict = template.render(turns, **others)
    agree = controls.unmarked_texts(rendered, mark) == controls.unmarked_texts(strict, mark)
    return rendered if agree else strict
