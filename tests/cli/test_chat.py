"""`ostro chat` as people use it: in a terminal of its own, and in pipes."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from terminal import CTRL_C, CTRL_D, OSTRO, PATIENCE, UP, Screen, terminal
from warm_start import warm_run

from ostro import Client
from ostro.cli import _parser, main
from ostro.cli.chat import _options
from ostro.cli.own_sampling import own_sampling
from ostro.client.options import ChatOptions
from ostro.sources.pypi import DEFAULT_MODEL, fetch

# As many tokens as are asked for, and always the same.
ENDLESS = ("--temperature", "0", "--ignore-eos")
# What is typed before they are shown may be lost: the terminal changes its mode for them.
PROMPT, MORE = "\n> ", "\n. "


@contextmanager
def chat(*args: str, env: Mapping[str, str] | None = None) -> Iterator[Screen]:
    with terminal("chat", *args, env=env) as screen:
        yield screen


@pytest.fixture(autouse=True)
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what is typed is kept: nobody's own file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ostro" / "chat_history"


@pytest.fixture(scope="module")
def embedded() -> None:
    fetch(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = ["--max-seq-len", "256"]
    with live_server(tmp_path_factory.mktemp("server"), str(model), *limits, faults="fake,step_seconds=0.1") as server:
        yield server


# --- terminals ------------------------------------------------------------------------------------------------------


def test_a_conversation(server: LiveServer, tmp_path: Path) -> None:
    saved = tmp_path / "said.json"
    with chat("--url", server.url, "--max-tokens", "4", "--system", "yes", *ENDLESS) as screen:
        screen.until("/help lists the commands")
        for prompt, typed in [
            (PROMPT, "the fox\n"),
            (PROMPT, "the quick \\\n"),
            (MORE, "dog\n"),
            (PROMPT, '"""\n'),
            (MORE, "yes\n"),
            (MORE, 'no"""\n'),
            (PROMPT, f"/save {saved}\n"),
            (PROMPT, "/clear\n"),
            (PROMPT, f"/save {saved}2\n"),
            (PROMPT, CTRL_D),
        ]:
            screen.until(prompt)
            screen.type(typed)
        assert screen.end() == 0
        # Tokens that come all at once have no rate.
        assert len(re.findall(r"\n4 tokens · ([\d.]+ tokens/s · )?first after [\d.]+ s\r", screen.shown)) == 3
        assert screen.shown.count("Written to ") == 2
        assert "The conversation is empty." in screen.shown
    said = json.loads(saved.read_text())
    assert said["model"] == "tiny"
    assert [message["role"] for message in said["messages"]] == ["system", *["user", "assistant"] * 3]
    assert [said["messages"][index]["content"] for index in (0, 1, 3, 5)] == [
        "yes",
        "the fox",
        "the quick \ndog",
        "yes\nno",
    ]
    assert all(message["content"] for message in said["messages"])
    assert json.loads(Path(f"{saved}2").read_text())["messages"] == [{"role": "system", "content": "yes"}]


@pytest.mark.full
def test_arrow_keys_bring_back_what_was_typed_on_other_days(server: LiveServer, history: Path) -> None:
    for typed, rest in (("the fox", "\n"), (UP, " jumps\n")):
        with chat("--url", server.url, "--max-tokens", "1", *ENDLESS) as screen:
            screen.until(PROMPT)
            screen.type(typed)
            # Where it was an arrow, its line editing shows it.
            screen.until("the fox")
            screen.type(rest)
            screen.until("1 token")
            screen.until(PROMPT)
            screen.type(CTRL_D)
            assert screen.end() == 0
    assert history.read_text().splitlines() == ["the fox", "the fox jumps"]
    assert history.stat().st_mode & 0o077 == 0


def test_a_history_that_cannot_be_kept_is_done_without(server: LiveServer, history: Path) -> None:
    history.parent.parent.write_text("no directory")
    with chat("--url", server.url, "--max-tokens", "1", *ENDLESS) as screen:
        screen.until(PROMPT)
        screen.type("the fox\n")
        screen.until("1 token")
        screen.until(PROMPT)
        screen.type(CTRL_D)
        assert screen.end() == 0
        assert "Traceback" not in screen.shown


@pytest.mark.full
def test_the_default_model_answers_in_lines_that_end_at_words(embedded: None) -> None:
    args = ("--max-tokens", "60", "--temperature", "0", "--ignore-eos")
    answers = []
    with terminal("chat", *args, env={"OSTRO_FAULTS": ""}, columns=40) as screen:
        for columns in (40, 1000):
            screen.until(PROMPT)
            screen.type("/clear\n")
            screen.until(PROMPT)
            screen.resize(columns)
            screen.type("Tell me about foxes.\n")
            screen.until("foxes.\r\n")
            answers.append(screen.until("\n60 tokens · ").removesuffix("\n60 tokens · ").replace("\r", ""))
        screen.until(PROMPT)
        screen.type(CTRL_D)
        assert screen.end() == 0
    narrow, wide = answers
    assert narrow.split() == wide.split()
    assert all(len(line) < 40 for line in narrow.splitlines())
    assert len(narrow.splitlines()) > len(wide.splitlines())


def test_only_what_was_asked_for_is_sent() -> None:
    """The model's own defaults hold for the rest."""
    args = _parser(["chat"]).parse_args(["chat"])
    assert _options(args) == {}
    args = _parser(["chat"]).parse_args(["chat", "--temperature", "0", "--max-tokens", "5", "--stop", "x"])
    assert _options(args) == {"temperature": 0.0, "max_tokens": 5, "stop": ["x"]}


def test_a_model_that_recommends_no_sampling_gets_one_and_the_note_says_so(server: LiveServer) -> None:
    with chat("--url", server.url) as screen:
        screen.until("The model recommends no sampling: temperature 0.6 and top_p 0.95 are used.")
        screen.until(PROMPT)
    with chat("--url", server.url, "--top-k", "5") as screen:
        assert "recommends no sampling" not in screen.until(PROMPT)


@pytest.mark.parametrize(
    ("recommended", "given", "sent"),
    [
        ({}, {}, {"temperature": 0.6, "top_p": 0.95}),
        ({"max_tokens": 9}, {"seed": 1}, {"temperature": 0.6, "top_p": 0.95}),
        ({"top_k": 20}, {}, {}),
        ({"temperature": 0.0}, {}, {}),
        ({}, {"temperature": 1.0}, {}),
        (None, {}, {}),
    ],
)
def test_own_sampling_is_for_models_and_users_that_say_nothing(
    recommended: Mapping[str, object] | None, given: ChatOptions, sent: ChatOptions
) -> None:
    assert own_sampling(recommended, given) == sent


def test_ctrl_c_stops_the_answer_and_not_the_program(server: LiveServer) -> None:
    with chat("--url", server.url, "--max-tokens", "200", *ENDLESS) as screen, Client(server.url) as client:
        screen.until(PROMPT)
        screen.type("the fox\n")
        screen.until("the fox\r\n")
        until(lambda: client.stats().models[0].requests == 1)
        screen.type(CTRL_C)
        screen.until("stopped after about ")
        until(lambda: client.stats().models[0].requests == 0)
        screen.until(PROMPT)
        screen.interrupt_until("Ctrl-D or /exit ends.")
        screen.until(PROMPT)
        screen.type("/exit\n")
        assert screen.end() == 0
        assert "Traceback" not in screen.shown


def test_commands_and_mistakes(server: LiveServer) -> None:
    with chat("--url", server.url, "--max-tokens", "2", *ENDLESS) as screen:
        for typed, answer in [
            ("/help", "/save FILE"),
            ("/system", "There is no system message."),
            ("/system Be brief.", "System message: Be brief."),
            ("/model", "* tiny  (ready)"),
            ("/model tiny", "tiny answers from now on."),
            ("/model nobody", "There is no model 'nobody'"),
            ("/save", "Name a file"),
            ("/save /nowhere/at/all.json", "Cannot write /nowhere/at/all.json"),
            ("/nonsense", "/nonsense is not a command"),
            ("the fox " * 400, "/clear."),
            ("the fox", "2 tokens · "),
        ]:
            screen.until(PROMPT)
            screen.type(typed + "\n")
            screen.until(answer)
        screen.until(PROMPT)
        screen.type("/exit\n")
        assert screen.end() == 0
        assert "Traceback" not in screen.shown


def test_parameters_are_set_and_taken_back(server: LiveServer) -> None:
    with chat("--url", server.url, "--max-tokens", "2", *ENDLESS) as screen:
        for typed, answer in [
            ("/help", "/set [NAME VALUE]"),
            ("/set", "max_tokens              2\r"),
            ("/set", "temperature             0\r"),
            ("/set", "seed                    random (default)\r"),
            ("/set max_tokens 3", "max_tokens  3\r"),
            ("the fox", "3 tokens"),
            ("/set --max-tokens 4", "max_tokens  4\r"),
            ("the fox", "4 tokens"),
            ("/set ignore-eos off", "ignore_eos  off\r"),
            ("/set stop the end", "stop  'the end'\r"),
            ("/set stop default", "stop  none (default)\r"),
            ("/set top_p", "top_p  1 (default)\r"),
            ("/set temperature 9", "temperature must be"),
            ("/set temperature warm", "temperature takes a number, not warm"),
            ("/set max_tokens 1.5", "max_tokens takes an integer"),
            ("/set ignore_eos perhaps", "ignore_eos is on or off"),
            ("/set temprature 1", "Did you mean temperature?"),
            ("/set n 2", "n is not a sampling parameter"),
            ("the fox", "4 tokens"),
        ]:
            screen.until(PROMPT)
            screen.type(typed + "\n")
            screen.until(answer)
        screen.until(PROMPT)
        screen.type(CTRL_D)
        assert screen.end() == 0
        assert "Traceback" not in screen.shown


def test_an_answer_is_asked_for_again(server: LiveServer, tmp_path: Path) -> None:
    saved = tmp_path / "said.json"
    with chat("--url", server.url, "--max-tokens", "2", *ENDLESS) as screen:
        for typed, answer in [
            ("/retry", "There is no answer to drop yet"),
            ("the fox", "2 tokens"),
            ("the dog", "2 tokens"),
            ("/set max_tokens 5", "5"),
            ("/retry", "5 tokens"),
            # One that fails leaves what there was.
            ("/set max_tokens 100000", "100000"),
            ("/retry", "/clear"),
            (f"/save {saved}", "Written to"),
        ]:
            screen.until(PROMPT)
            screen.type(typed + "\n")
            screen.until(answer)
        screen.until(PROMPT)
        screen.type(CTRL_D)
        assert screen.end() == 0
    first, second, third, fourth = json.loads(saved.read_text())["messages"]
    assert [each["role"] for each in (first, second, third, fourth)] == ["user", "assistant"] * 2
    assert (first["content"], third["content"]) == ("the fox", "the dog")
    with Client(server.url) as client:
        long = client.chat([first, second, third], max_tokens=5, temperature=0, ignore_eos=True)
    assert fourth["content"] == long.choices[0].message.content


def test_files_and_saved_conversations_are_loaded(server: LiveServer, tmp_path: Path) -> None:
    notes, saved, empty = tmp_path / "notes.txt", tmp_path / "said.json", tmp_path / "empty.txt"
    notes.write_text("one\n```\ntwo\n```\n")
    (tmp_path / "data.json").write_text('{"messages": "none"}')
    (tmp_path / "picture").write_bytes(b"\xff\xd8")
    (tmp_path / "long.txt").write_text("the fox " * 400)
    empty.touch()
    with chat("--url", server.url, "--max-tokens", "2", *ENDLESS) as screen:
        for typed, answer in [
            ("/load", "Name a file"),
            (f"/load {tmp_path}", "is a directory"),
            ("/load /nowhere/at/all", "Cannot read /nowhere/at/all"),
            (f"/load {tmp_path / 'picture'}", "is not UTF-8 text"),
            (f"/load {empty}", "is empty"),
            (f"/load {tmp_path / 'long.txt'}", "and the model has room for 256"),
            (f"/load {tmp_path / 'data.json'}", "tokens, goes into the next message"),
            ("/clear", "The conversation is empty"),
            (f"/load {notes}", "tokens, goes into the next message"),
            ("/load", "notes.txt goes into the next message"),
            ("the fox", "2 tokens"),
            ("the dog", "2 tokens"),
            (f"/save {saved}", "Written to"),
            ("/clear", "The conversation is empty"),
            (f"/load {saved}", "The conversation of said.json continues, after 4 messages."),
            (f"/save {saved}2", "Written to"),
        ]:
            screen.until(PROMPT)
            screen.type(typed + "\n")
            screen.until(answer)
        screen.until(PROMPT)
        screen.type(CTRL_D)
        assert screen.end() == 0
        assert "Traceback" not in screen.shown
    said = json.loads(saved.read_text())["messages"]
    assert said[0]["content"] == "notes.txt:\n````\none\n```\ntwo\n```\n````\n\nthe fox"
    assert said[2]["content"] == "the dog"
    assert json.loads(Path(f"{saved}2").read_text())["messages"] == said


@pytest.mark.full
def test_a_model_is_served_for_the_conversation_and_no_longer(model: Path) -> None:
    with chat(str(model), "--max-tokens", "2", *ENDLESS, env={"OSTRO_FAULTS": "fake"}) as screen:
        address = screen.until(". /help").split(" at ")[1].split(". /help")[0]
        screen.until(PROMPT)
        screen.type("the fox\n")
        screen.until("2 tokens")
        screen.until(PROMPT)
        screen.type(CTRL_D)
        assert screen.end() == 0
    with Client(address) as client:
        assert not client.healthy()


def test_a_killed_conversation_leaves_no_server(model: Path) -> None:
    with chat(str(model), env={"OSTRO_FAULTS": "fake"}) as screen:
        address = screen.until(". /help").split(" at ")[1].split(". /help")[0]
        with Client(address) as client:
            assert client.healthy()
            screen.process.send_signal(signal.SIGKILL)
            screen.process.wait()
            until(lambda: not client.healthy())


# --- pipes ----------------------------------------------------------------------------------------------------------


def test_prompt_gets_an_answer(server: LiveServer) -> None:
    asked = ["--temperature", "0", "--max-tokens", "6", "--system", "yes"]
    done = warm_run(["chat", "--url", server.url, *asked], input="the fox\n", timeout=PATIENCE)
    messages = [{"role": "system", "content": "yes"}, {"role": "user", "content": "the fox"}]
    with Client(server.url) as client:
        answer = client.chat(messages, temperature=0, max_tokens=6).choices[0].message.content
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{answer}\n", "")


def test_output_is_constrained_to_the_structure(server: LiveServer) -> None:
    words = ["chat", "--url", server.url, "--choice", "red", "--choice", "green"]
    done = warm_run(words, input="A colour?\n", timeout=PATIENCE)
    assert (done.returncode, done.stdout.strip() in ("red", "green"), done.stderr) == (0, True, "")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("text", "args", "told", "status"),
    [
        ("x", ["--url", "http://127.0.0.1:9"], "Start one with `ostro serve`", 1),
        ("x", ["--url", "nonsense"], "is not a server address", 2),
        ("x", ["/nowhere/model"], "/nowhere/model", 1),
        ("x", ["model", "--url", "http://127.0.0.1:9"], "leave one of them out", 2),
        ("x", ["--n", "2"], "leave out --n", 2),
        ("x", ["--model", "tiny"], "leave --url and --model out", 1),
        ("x", ["--url", "SERVER", "--temperature", "9"], "temperature must be", 2),
        ("\n", ["--url", "SERVER"], "nothing to answer", 2),
    ],
)
def test_failures_are_reported_in_one_line(
    server: LiveServer,
    text: str,
    args: list[str],
    told: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.setattr("ostro.cli.chat.DEFAULT_URL", "http://127.0.0.1:9")
    assert main(["chat", *(server.url if arg == "SERVER" else arg for arg in args)]) == status
    shown = capsys.readouterr()
    [line] = shown.err.splitlines()
    assert shown.out == ""
    assert line.startswith("ostro: ")
    assert told in line


@pytest.mark.full
def test_a_reader_that_leaves_ends_it_quietly(server: LiveServer) -> None:
    command = [*OSTRO, "chat", "--url", server.url, "--max-tokens", "200", *ENDLESS]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        Client(server.url) as client,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"the fox")
        process.stdin.close()
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 128 + signal.SIGPIPE
        until(lambda: client.stats().models[0].requests == 0)


def test_help_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["chat", "--help"])
    assert caught.value.code == 0
    assert "--system" in capsys.readouterr().out


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
