"""A conversation with a model in a terminal, and its commands. Uses a client; does not know how its server started."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from ostro.cli.chat_parameters import UNSET, parameter_name, parameter_value, parameters
from ostro.cli.files import written_whole
from ostro.cli.loading import Attachment, load
from ostro.cli.own_sampling import NOTE, own_sampling
from ostro.cli.terminal import BLOCK, History, Terminal, history_path
from ostro.client.client import Client
from ostro.client.options import ChatOptions
from ostro.errors import BadRequest, ContextLengthExceeded, OstroError

HELP = f"""\
/clear             forget the conversation so far
/retry             drop the last answer and ask again
/system [TEXT]     show or set the system message
/model [NAME]      list the server's models, or switch to one
/set [NAME VALUE]  show the sampling parameters, or set one; {UNSET} takes it back
/load [FILE]       put a text file into the next message, or continue a saved conversation
/save FILE         write the conversation to a file, as JSON
/help              show this
/exit              leave (Ctrl-D does, too)

Ctrl-C             stop an answer
Up, Down           earlier messages, also from earlier sessions
\\ at the end       continue the message on the next line
{BLOCK}                before and after a message of several lines
A message that begins with a slash needs a space before it."""


class Conversation:
    def __init__(self, client: Client, options: ChatOptions, *, system: str | None = None) -> None:
        self._client = client
        self._options = options
        self._system = system
        self._said: list[dict[str, str]] = []
        self._attached: list[Attachment] = []
        """For the next message."""
        self._commands: dict[str, Callable[[Terminal, str], None]] = {
            "/clear": self._clear,
            "/retry": self._retry,
            "/system": self._set_system,
            "/model": self._set_model,
            "/set": self._set,
            "/load": self._load,
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
        with self._client.stream_chat(self.messages, **self._sampled()) as stream:
            for piece in stream.text:
                print(piece, end="", flush=True)
        print()

    def talk(self, terminal: Terminal) -> None:
        """Runs until the end of input."""
        history = History(history_path())
        terminal.remark(f"{self._model_name()} at {self._client.url}. /help lists the commands, Ctrl-D ends.")
        self._tell_sampling(terminal)
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
            if self._answer(terminal, "".join([*(each.text for each in self._attached), text.strip()])):
                self._attached.clear()
            return
        name, _, rest = text.partition(" ")
        if name not in self._commands:
            raise BadRequest(f"{name} is not a command. /help lists them.")
        self._commands[name](terminal, rest.strip())

    def _answer(self, terminal: Terminal, text: str) -> bool:
        """Shows the answer and adds it to the conversation, or nothing if it fails. Returns whether it did."""
        self._said.append({"role": "user", "content": text})
        timing = _Timing()
        pieces: list[str] = []
        num_tokens: int | None = None
        try:
            with self._client.stream_chat(self.messages, **self._sampled()) as stream:
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
            raise BadRequest(f"{error} Or start over with /clear.") from error
        except OstroError:
            del self._said[-1]
            if pieces:
                terminal.end_answer()
            raise
        is_added = bool(pieces) or num_tokens is not None
        if is_added:
            self._said.append({"role": "assistant", "content": "".join(pieces)})
        else:
            del self._said[-1]
        terminal.end_answer()
        terminal.remark(timing.summary(num_tokens, len(pieces)))
        return is_added

    # --- commands ---------------------------------------------------------------------------------------------------

    def _clear(self, terminal: Terminal, rest: str) -> None:
        self._said.clear()
        self._attached.clear()
        terminal.remark("The conversation is empty.")

    def _retry(self, terminal: Terminal, rest: str) -> None:
        if not self._said:
            raise BadRequest("There is no answer to drop yet: ask something first.")
        *before, question, answer = self._said
        self._said = before
        is_added = False
        try:
            is_added = self._answer(terminal, question["content"])
        finally:
            if not is_added:
                # The answer that there was is better than none.
                self._said = [*before, question, answer]

    def _set(self, terminal: Terminal, rest: str) -> None:
        name, _, value = rest.partition(" ")
        given = cast(dict[str, object], self._options)
        if value.strip() == UNSET:
            given.pop(parameter_name(name), None)
        elif value.strip():
            given[parameter_name(name)] = parameter_value(name, value.strip())
        rows = parameters(self._sampled(), self._recommended() or {})
        shown = {parameter_name(name)} if name else rows.keys()
        width = max(map(len, shown))
        for each in rows:
            if each in shown:
                terminal.remark(f"{each:<{width}}  {rows[each]}")

    def _load(self, terminal: Terminal, rest: str) -> None:
        if not rest:
            for each in self._attached:
                terminal.remark(f"{each.name} goes into the next message.")
            if not self._attached:
                raise BadRequest("Name a file: /load FILE.")
            return
        loaded = load(Path(rest).expanduser())
        if isinstance(loaded, Attachment):
            counted = self._client.tokenize(loaded.text, model=self._model_name())
            if counted.max_model_len is not None and counted.count > counted.max_model_len:
                raise BadRequest(
                    f"{loaded.name} has {counted.count} tokens, and the model has room for {counted.max_model_len}. "
                    "Load a part of it."
                )
            self._attached.append(loaded)
            terminal.remark(f"{loaded.name}, {counted.count} tokens, goes into the next message. /clear drops it.")
            return
        self._system, self._said = loaded.system, list(loaded.said)
        count = f"{len(self._said)} message{'' if len(self._said) == 1 else 's'}"
        terminal.remark(f"The conversation of {loaded.name} continues, after {count}.")

    def _set_system(self, terminal: Terminal, rest: str) -> None:
        if rest:
            self._system = rest
        terminal.remark(f"System message: {self._system}" if self._system else "There is no system message.")

    def _set_model(self, terminal: Terminal, rest: str) -> None:
        if rest:
            self._options["model"] = self._client.model(rest).id
            terminal.remark(f"{rest} answers from now on.")
            self._tell_sampling(terminal)
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

    def _sampled(self) -> ChatOptions:
        """The options, and a sampling of our own for a model that recommends none."""
        return {**self._options, **own_sampling(self._recommended(), self._options)}

    def _tell_sampling(self, terminal: Terminal) -> None:
        if own_sampling(self._recommended(), self._options):
            terminal.remark(NOTE)

    def _recommended(self) -> Mapping[str, object] | None:
        """The model's sampling defaults; None if they are not known."""
        try:
            return self._client.model(self._model_name()).sampling_defaults
        except OstroError:
            # Its answer will say what is wrong.
            return None

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
        """Counts pieces, most of which are one token, if the server's token count, which comes last, is missing."""
        stopped = num_tokens is None
        count = num_pieces if num_tokens is None else num_tokens
        parts = [f"{'stopped after about ' if stopped else ''}{count} token{'' if count == 1 else 's'}"]
        if self._first is not None:
            if count > 1 and self._last > self._first:
                parts.append(f"{(count - 1) / (self._last - self._first):.1f} tokens/s")
            parts.append(f"first after {self._first - self._began:.2f} s")
        return " · ".join(parts)
