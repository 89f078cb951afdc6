"""The process that renders one model's chat template, under resource limits enforced by the kernel. See `renderer`."""

import sys
from collections.abc import Callable

import msgspec

from ostro.errors import BadRequest, Unsupported
from ostro.processes.worker_process import serve
from ostro.text.chat import ChatTemplate, RenderOptions
from ostro.text.control_text import ControlTexts
from ostro.text.jinja_template import JinjaTemplate
from ostro.text.marked_chat import render_guarded
from ostro.text.render_messages import Conversation, Refused, Rendered, Setup, TooLong


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
