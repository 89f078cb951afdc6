"""The process that renders one model's chat template, under resource limits enforced by the kernel. See `renderer`, and
control_text.py for why texts from messages are marked.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack, cast

import msgspec

from ostro.errors import BadRequest, Unsupported
from ostro.processes.worker_process import serve
from ostro.text.chat import ChatTemplate, Message, RenderOptions, Tools
from ostro.text.control_text import ControlTexts, Marker
from ostro.text.jinja_template import JinjaTemplate
from ostro.text.render_messages import Conversation, Refused, Rendered, Setup, TooLong

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


class _Rendering:
    def __init__(self, setup: Setup) -> None:
        self._template = JinjaTemplate(ChatTemplate(setup.source, setup.variables, setup.tool_source))
        self._controls, self._guarded = ControlTexts(setup.controls), ControlTexts(setup.guarded)
        self._out_of_memory = msgspec.msgpack.encode(
            Refused(f"The chat template failed: it needs more than {setup.bytes >> 20} MiB of memory.")
        )

    def reply(self, message: bytes) -> bytes:
        try:
            return msgspec.msgpack.encode(self._rendered(msgspec.msgpack.decode(message, type=Conversation)))
        except BadRequest as error:
            return msgspec.msgpack.encode(
                Refused(error.message, isinstance(error, Unsupported), error.param or "messages")
            )
        except UnicodeEncodeError:
            return msgspec.msgpack.encode(
                Refused("The chat template failed: it made half a surrogate pair, which is not a character.")
            )
        except MemoryError:
            return self._out_of_memory

    def _rendered(self, asked: Conversation) -> Rendered | TooLong:
        text = self._text(asked)
        return Rendered(text) if len(text) <= asked.max_characters else TooLong(len(text))

    def _text(self, asked: Conversation) -> str:
        options = RenderOptions(
            tools=asked.tools,
            template_kwargs=asked.template_kwargs,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        if asked.mark is None:
            return self._template.render(asked.messages, **options)
        return render_guarded(
            self._template,
            asked.messages,
            controls=self._controls,
            guarded=self._guarded,
            mark=asked.mark,
            **options,
        )


def begin(setup: bytes) -> Callable[[bytes], bytes]:
    return _Rendering(msgspec.msgpack.decode(setup, type=Setup)).reply


if __name__ == "__main__":
    serve(int(sys.argv[1]), begin)
