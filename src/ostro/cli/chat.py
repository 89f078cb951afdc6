"""ostro chat: a conversation in the terminal, with a server that runs or one that is started for it."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from ostro.cli.conversation import Conversation, Terminal
from ostro.cli.options import add_sampling_options
from ostro.cli.own_server import own_server
from ostro.cli.parser import describe
from ostro.client.client import Client
from ostro.client.options import ChatOptions
from ostro.errors import BadRequest, Unreachable

DEFAULT_URL = "http://127.0.0.1:8000"
_LOOK_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reference",
        nargs="?",
        metavar="MODEL",
        help="short name, directory, file or Hub id to serve for this conversation (default: what a running server "
        "has, or the embedded model)",
    )
    parser.add_argument("--url", metavar="URL", help=f"a server that runs (default: {DEFAULT_URL}, if one is there)")
    parser.add_argument("--model", metavar="NAME", help="one of the server's models (default: its first)")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: OSTRO_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_sampling_options(parser)
    describe(
        parser,
        {
            "ostro chat": "with the server at 127.0.0.1:8000, or one of its own",
            "ostro chat qwen2.5-coder-0.5b": "with this model",
            "ostro chat < question.txt": "one answer, and nothing else",
        },
        "What is not set here is the model's own: temperature, top_p and how long an answer may be.",
    )


def run(args: argparse.Namespace) -> int:
    if args.n not in (None, 1):
        raise BadRequest("A conversation goes on with one answer: leave --n out.", param="n")
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
    """One that is ready."""
    if args.reference is not None and (args.url is not None or args.model is not None):
        raise BadRequest("MODEL is served here; --url and --model are for a server that runs: leave one of them out.")
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
    loading = f"Loading {args.reference or 'the embedded model'}…"

    def waiting(seconds: float, doing: str) -> None:
        terminal.status(f"{loading} {seconds:.0f} s" + (f" · {doing}" if doing else ""))

    with own_server(args.reference, waiting) as client:
        terminal.status("")
        yield client


def _options(args: argparse.Namespace) -> ChatOptions:
    """What was given; the server has defaults for the rest."""
    given = {name: getattr(args, name, None) for name in ChatOptions.__annotations__}
    # By identity: a temperature of 0 equals False.
    chosen = {name: value for name, value in given.items() if value is not None and value is not False and value != []}
    return cast(ChatOptions, chosen)
