"""Client libraries against a running server, each in a process of its own: importing them warns, starts threads and
changes what is global.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer
from scripted_answers import Scripts

# Libraries that would call home, and credentials of the machine's user that a library would prefer to ours.
_QUIET = {
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "none",
    "NO_PROXY": "127.0.0.1",
}
_FOREIGN = ("ANTHROPIC_", "OPENAI_", "LANGCHAIN_", "LANGSMITH_")


def call(name: str, /, **arguments: object) -> str:
    """A tool call in the generic format, for models without a format of their own."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# A conversation that most clients can have: they are asked with one key, and their tool answers with another.
SCRIPTS = Scripts()
SUNNY = SCRIPTS.add("It is sunny in Oslo.")
CALLS = SCRIPTS.add(call("weather", city="Oslo") + "\n" + call("weather", city="Rome"))
TEXT_AND_CALL = SCRIPTS.add("Let me look." + call("weather", city="Oslo"))
PERSON = SCRIPTS.add('{"name": "Ada", "age": 36}')
PERSON_CALL = SCRIPTS.add(call("Person", name="Ada", age=36))
PARTIAL_CALL = SCRIPTS.add(call("PartialPerson", name="Ada", age=36))
RESULT_CALL = SCRIPTS.add(call("final_result", name="Ada", age=36))
ANSWER_CALL = SCRIPTS.add(call("final_answer", answer="sunny"))
CHAT_CALL = SCRIPTS.add(call("search_chats", query="Oslo"))
CODE = SCRIPTS.add("<code>\nweather(city='Bonn')\nfinal_answer('fine')\n</code>")


def needs(*packages: str, target: str = "make dev") -> pytest.MarkDecorator:
    """Skips a test where one of the packages, by the names that they are imported by, is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed: {target}")


def seen_by(program: str, server: LiveServer, directory: Path, *keys: str, python: str = sys.executable) -> Any:
    """The JSON that the program printed last. Its arguments: the server's URL, and keys of scripted answers.
    `python` is another environment's.
    """
    # A file, since some libraries read the sources of functions.
    path = directory / "program.py"
    path.write_text(program, encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    ran = subprocess.run(
        [python, "-W", "ignore", str(path), server.url, *keys],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=directory,
        env=inherited | _QUIET,
    )
    assert ran.returncode == 0, f"{ran.stderr}\n{server.log_text[-3000:]}"
    return json.loads(ran.stdout.splitlines()[-1])
