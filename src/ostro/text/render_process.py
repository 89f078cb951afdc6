"""The process that renders one model's chat template, under limits that the kernel enforces. See `renderer`.

Neither an operator, a filter nor a method of a template gets around them: memory beyond the limit is refused to the
process, and CPU time beyond it ends the process. On systems that do not bound a process's address space, such as
macOS, only the limit on time holds.
"""

import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import BinaryIO

import msgspec

from ostro.errors import BadRequest, Unsupported
from ostro.text.chat import ChatTemplate, RenderOptions
from ostro.text.control_text import ControlTexts
from ostro.text.jinja_template import JinjaTemplate
from ostro.text.marked_chat import render_guarded
from ostro.text.render_messages import LENGTH, Conversation, Refused, Rendered, Setup, TooLong


class _Rendering:
    def __init__(self, setup: Setup) -> None:
        self._template = JinjaTemplate(ChatTemplate(setup.source, setup.variables))
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


def main(descriptor: int) -> None:
    """Answers until the other end of the socket is closed."""
    connection = socket.socket(fileno=descriptor)
    with connection, connection.makefile("rb") as stream:
        message = _read(stream)
        if message is None:
            return
        setup = msgspec.msgpack.decode(message, type=Setup)
        _limit(setup.bytes)
        rendering = _Rendering(setup)
        while (message := _read(stream)) is not None:
            # Its signal ends the process, whatever that is busy with: nobody catches it.
            signal.setitimer(signal.ITIMER_PROF, setup.seconds)
            reply = rendering.reply(message)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(LENGTH.pack(len(reply)))
            connection.sendall(reply)


def _limit(memory: int) -> None:
    for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        _, hard = resource.getrlimit(kind)
        # Refused by systems that know the limit and do not keep it.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _read(stream: BinaryIO) -> bytes | None:
    """The next message; None once the other end is closed."""
    header = stream.read(LENGTH.size)
    return stream.read(*LENGTH.unpack(header)) if len(header) == LENGTH.size else None


if __name__ == "__main__":
    main(int(sys.argv[1]))
