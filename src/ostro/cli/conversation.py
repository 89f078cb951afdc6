"""A conversation with a model in a terminal. Uses a client; does not know how its server was started."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ostro.cli.files import written_whole
from ostro.cli.history import History, history_path
from ostro.cli.word_wrap import WordWrap
from ostro.client.client import Client
from ostro.client.options import ChatOptions
from ostro.errors import BadRequest, ContextLengthExceeded, OstroError

_BLOCK = '"""'
_USUAL_COLUMNS = 80
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")

HELP = f"""\
/clear          forget the conversation so far
/system [TEXT]  show or set the system message
/model [NAME]   list the server's models, or switch to one
/save FILE      write the conversation to a file, as JSON
/help           show this
/exit           leave (Ctrl-D does, too)

Ctrl-C          stop an answer
Up, Down        earlier messages, those of other days too
\\ at the end    the message goes on in the next line
{_BLOCK}             before and after a message of several lines
A message that begins with a slash needs a space before it."""


class Terminal:
    """Reads lines and shows text. Colours and overwrites nothing unless the output is a terminal."""

    def __init__(self) -> None:
        self._styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._status = ""
        self._wrap: WordWrap | None = None

    def read(self) -> str:
        """A message of one or several lines; raises EOFError at the end of input."""
        line = self._line("> ")
        if line.lstrip().startswith(_BLOCK):
            return self._block(line.lstrip().removeprefix(_BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(". "))
        return "\n".join(lines)

    def piece(self, text: str) -> None:
        """Prints part of an answer, wrapped at words. Replaces control characters, which could steer the terminal."""
        if sys.stdout.isatty():
            self._wrap = self._wrap or WordWrap(_columns)
            text = self._wrap.feed(_CONTROL.sub("\ufffd", text))
        print(text, end="", flush=True)

    def end_answer(self) -> None:
        print("" if self._wrap is None else self._wrap.end(), flush=True)
        self._wrap = None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def remark(self, text: str) -> None:
        """Prints a remark that is not part of the conversation."""
        print(f"\033[2m{text}\033[0m" if self._styled else text, flush=True)

    def status(self, text: str) -> None:
        """A status line that the next one overwrites; only on a terminal."""
        if sys.stderr.isatty() and (text or self._status):
            text = text[: _columns() - 1]
            print(f"\r{text:<{len(self._status)}}" + ("" if text else "\r"), end="", file=sys.stderr, flush=True)
            self._status = text

    def _line(self, prompt: str) -> str:
        # If stdout is a file, the prompt would end up in it.
        return input(prompt if sys.stdout.isatty() else "")

    def _block(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(_BLOCK):
            lines.append(line)
            line = self._line(". ")
        return "\n".join([*lines, line.rstrip().removesuffix(_BLOCK)]).strip("\n")


class Conversation:
    def __init__(self, client: Client, options: ChatOptions, *, system: str | None = None) -> None:
        self._client = client
        self._options = options
        self._system = system
        self._said: list[dict[str, str]] = []
        self._commands: dict[str, Callable[[Terminal, str], None]] = {
            "/clear": self._clear,
            "/system": self._set_system,
            "/model": self._set_model,
            "/save": self._save,
            "/help": lambda terminal, _: terminal.say(HELP),
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        told = [] if not self._system else [{"role": "system", "content": self._system}]
        return told + self._said

    def answer_once(self, text: str) -> None:
        """Prints the answer to a text on stdout, and nothing else."""
        text = text.removesuffix("\n")
        if not text.strip():
            raise BadRequest("There is nothing to answer: standard input is empty.")
        self._said.append({"role": "user", "content": text})
        with self._client.stream_chat(self.messages, **self._options) as stream:
            for piece in stream.text:
                print(piece, end="", flush=True)
        print()

    def talk(self, terminal: Terminal) -> None:
        """Runs until the end of input."""
        history = History(history_path())
        terminal.remark(f"{self._model_name()} at {self._client.url}. /help tells what you can do, Ctrl-D ends.")
        while True:
            try:
                text = terminal.read()
                history.keep()
            except EOFError:
                terminal.say("")
                return
            except KeyboardInterrupt:
                terminal.remark("\nCtrl-D or /exit ends.")
                continue
            if text.strip() in ("/exit", "/quit"):
                return
            try:
                self._do(terminal, text)
            except OstroError as error:
                terminal.remark(str(error))
            except KeyboardInterrupt:
                terminal.say("")

    def _do(self, terminal: Terminal, text: str) -> None:
        if not text.strip():
            return
        if not text.startswith("/"):
            self._answer(terminal, text)
            return
        name, _, rest = text.partition(" ")
        if name not in self._commands:
            raise BadRequest(f"{name} is not a command. /help lists them.")
        self._commands[name](terminal, rest.strip())

    def _answer(self, terminal: Terminal, text: str) -> None:
        """Shows the answer and adds it to the conversation; if it fails, nothing is added."""
        self._said.append({"role": "user", "content": text.strip()})
        timing = _Timing()
        pieces: list[str] = []
        num_tokens: int | None = None
        try:
            with self._client.stream_chat(self.messages, **self._options) as stream:
                for piece in stream.text:
                    timing.arrived()
                    pieces.append(piece)
                    terminal.piece(piece)
            num_tokens = stream.answer.usage.completion_tokens
        except KeyboardInterrupt:
            # Keep the part that was already shown as the model's answer.
            pass
        except ContextLengthExceeded as error:
            del self._said[-1]
            raise BadRequest(f"{error} Or forget what was said: /clear.") from error
        except OstroError:
            del self._said[-1]
            if pieces:
                terminal.end_answer()
            raise
        if not pieces and num_tokens is None:
            del self._said[-1]
        else:
            self._said.append({"role": "assistant", "content": "".join(pieces)})
        terminal.end_answer()
        terminal.remark(timing.summary(num_tokens, len(pieces)))

    # --- commands ---------------------------------------------------------------------------------------------------

    def _clear(self, terminal: Terminal, rest: str) -> None:
        self._said.clear()
        terminal.remark("Nothing was said yet.")

    def _set_system(self, terminal: Terminal, rest: str) -> None:
        if rest:
            self._system = rest
        terminal.remark(f"The model is told: {self._system}" if self._system else "The model is told nothing.")

    def _set_model(self, terminal: Terminal, rest: str) -> None:
        if rest:
            self._options["model"] = self._client.model(rest).id
            terminal.remark(f"{rest} answers from now on.")
            return
        current = self._model_name()
        for card in self._client.models().data:
            terminal.say(f"{'*' if card.id == current else ' '} {card.id}  ({card.state})")

    def _save(self, terminal: Terminal, rest: str) -> None:
        if not rest:
            raise BadRequest("Name a file: /save FILE.")
        path = Path(rest).expanduser()
        with written_whole(path) as file:
            json.dump({"model": self._model_name(), "messages": self.messages}, file, ensure_ascii=False, indent=2)
            file.write("\n")
        terminal.remark(f"Written to {path}.")

    def _model_name(self) -> str:
        if "model" in self._options:
            return self._options["model"]
        listed = self._client.models().data
        return listed[0].id if listed else "default"


class _Timing:
    """Timing of one answer."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began

    def arrived(self) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last

    def summary(self, num_tokens: int | None, num_pieces: int) -> str:
        """Without the server's token count, which comes last, counts pieces: most are one token."""
        stopped = num_tokens is None
        count = num_pieces if num_tokens is None else num_tokens
        parts = [f"{'stopped after about ' if stopped else ''}{count} token{'' if count == 1 else 's'}"]
        if self._first is not None:
            if count > 1 and self._last > self._first:
                parts.append(f"{(count - 1) / (self._last - self._first):.1f} tokens/s")
            parts.append(f"first after {self._first - self._began:.2f} s")
        return " · ".join(parts)


def _columns() -> int:
    """The current width of the window, which the COLUMNS variable may not reflect."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL_COLUMNS
    except OSError:
        return _USUAL_COLUMNS
