"""ostro chat: a conversation in the terminal, with a running server or one started for it."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from ostro.cli.conversation import Conversation
from ostro.cli.options import add_sampling_options, add_structured_options, structured_fields
from ostro.cli.own_server import own_server
from ostro.cli.parser import describe
from ostro.cli.servers import DEFAULT_URL
from ostro.cli.terminal import Terminal
from ostro.client.client import Client
from ostro.client.options import ChatOptions, StructuredOptions
from ostro.errors import BadRequest, Unreachable

_LOOK_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reference",
        nargs="?",
        metavar="MODEL",
        help="short name, directory, file or Hub id to load for this conversation (default: the model of a running "
        "server, or the default model)",
    )
    parser.add_argument(
        "--url", metavar="URL", help=f"a running server (default: {DEFAULT_URL}, if one is listening there)"
    )
    parser.add_argument("--model", metavar="NAME", help="one of the server's models (default: its first)")
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key (default: OSTRO_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_sampling_options(parser)
    add_structured_options(parser)
    describe(
        parser,
        {
            "ostro chat": "use the server at 127.0.0.1:8000, or start one",
            "ostro chat qwen2.5-coder-0.5b": "load this model",
            "ostro chat < question.txt": "print one answer and exit",
        },
        "Sampling parameters that are not set here take the model's own defaults, including the length limit.",
    )


def run(args: argparse.Namespace) -> int:
    if args.n not in (None, 1):
        raise BadRequest("A conversation continues with a single answer: leave out --n.", param="n")
    terminal = Terminal()
    with _server(args, terminal) as client:
        conversation = Conversation(client, _options(args), system=args.system)
        if sys.stdin.isatty():
            conversation.talk(terminal)
        else:
            conversation.answer_once(sys.stdin.read())
    return 0


@contextmanager
def _server(args: argparse.Namespace, terminal: Terminal) -> Iterator[Client]:
    """A client of a server that is ready."""
    if args.reference is not None and (args.url is not None or args.model is not None):
        raise BadRequest(
            "MODEL starts a server of its own, --url and --model use a running one: leave one of them out."
        )
    with Client(args.url or DEFAULT_URL, args.api_key) as client:
        found = args.reference is None and client.healthy(_LOOK_SECONDS)
        if found:
            if not client.ready():
                terminal.status("The server is loading its model…")
                client.wait_until_ready()
                terminal.status("")
            yield client
            return
        if args.url is not None or args.model is not None:
            cure = "Start one with `ostro serve`, or leave --url and --model out."
            raise Unreachable(f"No Ostro server answers at {client.url}. {cure}")
    loading = f"Loading {args.reference or 'the default model'}…"

    def waiting(seconds: float, doing: str) -> None:
        terminal.status(f"{loading} {seconds:.0f} s" + (f" · {doing}" if doing else ""))

    with own_server(args.reference, waiting) as client:
        terminal.status("")
        yield client


def _options(args: argparse.Namespace) -> ChatOptions:
    """Only the given options; the server has defaults for the rest."""
    plain = ChatOptions.__annotations__.keys() - StructuredOptions.__annotations__.keys()
    given = {name: getattr(args, name, None) for name in plain} | structured_fields(args)
    # By identity, because a temperature of 0 equals False.
    chosen = {name: value for name, value in given.items() if value is not None and value is not False and value != []}
    return cast(ChatOptions, chosen)
