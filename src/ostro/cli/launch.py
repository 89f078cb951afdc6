"""ostro launch: starts a coding agent against a running server, with the settings it needs and for this run alone."""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ostro.cli.agents import AGENTS, Agent, Endpoint, Preparation
from ostro.cli.parser import describe
from ostro.cli.servers import DEFAULT_URL, only, running_servers
from ostro.cli.terminal import Terminal
from ostro.client.client import Client
from ostro.client.target import key_in_environment
from ostro.errors import DiskFull, Unreachable, Unsupported
from ostro.schemas.models import ModelCard

_LOOK_SECONDS = 2.0
_HIDDEN = "***"
_ARGUMENT = "--agent-argument"


def translate(words: Sequence[str]) -> list[str]:
    """The words after `--` are the agent's, whatever they look like."""
    if "--" not in words:
        return list(words)
    end = words.index("--")
    return [*words[:end], *(f"{_ARGUMENT}={word}" for word in words[end + 1 :])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostro launch AGENT [options] [-- ARGUMENT ...]"
    parser.add_argument("agent", metavar="|".join(AGENTS), choices=tuple(AGENTS), help="the agent to start")
    parser.add_argument(
        "--url",
        metavar="URL",
        help=f"a running server (default: the one that `ostro ps` lists, otherwise {DEFAULT_URL})",
    )
    parser.add_argument("--model", metavar="NAME", help="one of the server's models (default: its first)")
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key (default: OSTRO_API_KEY)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command, its variables and files, and start nothing"
    )
    parser.add_argument(_ARGUMENT, dest="arguments", action="append", default=[], help=argparse.SUPPRESS)
    describe(
        parser,
        {
            "ostro launch codex": "start Codex with the model of the running server",
            'ostro launch claude -- -p "What does this project do?"': "pass arguments to Claude Code",
            "ostro launch opencode --dry-run": "show what would be run",
        },
        "The agent's own settings files stay as they are. Its model must have learned to call tools, and have room for "
        "long prompts: see docs/client.md.",
    )


def run(args: argparse.Namespace) -> int:
    agent = AGENTS[args.agent]
    program = shutil.which(agent.program)
    if program is None:
        missing = f"{agent.title} is not installed: no {agent.program} in PATH."
        cure = f"Install it with `npm install -g {agent.package}`."
        if not args.dry_run:
            raise Unsupported(f"{missing} {cure}")
        print(f"{missing} {cure}", file=sys.stderr)
    endpoint = _endpoint(args)
    if (warning := _too_small(agent, endpoint)) is not None:
        print(warning, file=sys.stderr)
    if args.dry_run:
        # Nothing is written, not even the directory.
        place = Path(tempfile.gettempdir()) / "ostro-launch"
        shown = endpoint if endpoint.key is None else replace(endpoint, key=_HIDDEN)
        print(_description(agent, agent.prepare(shown, place), args.arguments), end="")
        return 0
    assert program is not None
    with _directory() as directory:
        preparation = agent.prepare(endpoint, directory)
        for path, text in preparation.files.items():
            path.write_text(text, encoding="utf-8")
        command = [program, *preparation.arguments, *args.arguments]
        return _run(command, _environment(preparation, os.environ))


# --- the server ------------------------------------------------------------------------------------------------------


def _endpoint(args: argparse.Namespace) -> Endpoint:
    url = args.url or _found_url()
    with Client(url, args.api_key) as client:
        if not client.healthy(_LOOK_SECONDS):
            raise Unreachable(
                f"No Ostro server answers at {client.url}. Start one with `ostro serve`, or give its --url."
            )
        if not client.ready():
            terminal = Terminal()
            terminal.status("The server is loading its model…")
            client.wait_until_ready()
            terminal.status("")
        card = _card(client, args.model)
        key = key_in_environment("OSTRO_API_KEY") if args.api_key is None else args.api_key
        return Endpoint(url=client.url, model=card.id, key=key or None, context=card.max_model_len)


def _found_url() -> str:
    servers = [record for record in running_servers() if record.state != "draining"]
    return only(servers, "Choose one with --url.").url if servers else DEFAULT_URL


def _card(client: Client, name: str | None) -> ModelCard:
    if name is None:
        listed = client.models().data
        if not listed:
            raise Unreachable(f"The server at {client.url} has no model yet. Name one with --model, or give it some.")
        card = listed[0]
    else:
        card = client.model(name)
    if card.max_model_len is None:
        # It is loaded on its first request, and how much fits is known then.
        client.tokenize("", model=card.id)
        card = client.model(card.id)
    return card


def _too_small(agent: Agent, endpoint: Endpoint) -> str | None:
    if endpoint.context is None or endpoint.context > agent.prompt_tokens:
        return None
    return (
        f"{agent.title} begins with some {agent.prompt_tokens:,} tokens, and {endpoint.model} has room for "
        f"{endpoint.context:,}. Serve a model with a longer context, or raise --max-seq-len."
    )


# --- the agent -------------------------------------------------------------------------------------------------------


def _description(agent: Agent, preparation: Preparation, arguments: Sequence[str]) -> str:
    """A shell command, after its files."""
    files = [f"# {path}, while {agent.title} runs:\n{text}\n" for path, text in preparation.files.items()]
    unset = [word for name in preparation.unset for word in ("-u", name)]
    variables = [f"{name}={shlex.quote(value)}" for name, value in preparation.variables.items()]
    environment = [" ".join(["env", *unset]), *variables] if unset or variables else []
    pairs = zip(preparation.arguments[::2], preparation.arguments[1::2], strict=True)
    own = [f"{flag} {shlex.quote(value)}" for flag, value in pairs]
    command = [*environment, agent.program, *own, *([shlex.join(arguments)] if arguments else [])]
    return "".join(files) + " \\\n  ".join(command) + "\n"


def _environment(preparation: Preparation, inherited: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in inherited.items() if name not in preparation.unset}
    return {**kept, **preparation.variables}


@contextmanager
def _directory() -> Iterator[Path]:
    """Readable only by its user, and deleted afterwards."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="ostro-launch-")
    except OSError as error:
        raise DiskFull(
            f"The agent's settings cannot be written ({error.strerror or error}). Set TMPDIR to a directory that can."
        ) from error
    with temporary as directory:
        yield Path(directory)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs it in this terminal; returns its exit status."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def passed_on(number: int, frame: object) -> None:
        # The agent runs a little before we know its id.
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    # Ctrl-C reaches the agent anyway, and is its to answer. A handler, because it would inherit an ignored signal.
    handlers = {signal.SIGINT: lambda number, frame: None, signal.SIGTERM: passed_on, signal.SIGHUP: passed_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        process = subprocess.Popen(command, env=environment)
        for number in early:
            process.send_signal(number)
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
