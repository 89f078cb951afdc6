"""Every command and every piece of code in the README and the docs works, or stands in a table here with the reason.

Programs of ours are run in a scratch directory that has what the docs name, against a live server; `ostro serve` as far
as its settings (`make test-docs` loads the models, too). A block that fits nothing below fails.
"""

import ast
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from doc_pages import ROOT, Block, Command, all_blocks, commands, name_of, pages
from doc_scratch import write_scratch
from live_server import LiveServer, live_server

from ostro.cli import COMMANDS, _parser, _translated, main
from ostro.config import PREFIX
from ostro.server.settings import ServeSettings, read_settings
from ostro.weights.levanter_config import read_levanter_model

SHELL = ("bash", "sh", "console", "shell")
OTHER_LANGUAGES = ("python", "javascript", "js", "yaml", "json", "text")
# Kept by tests of their own, which read the files: the docs only show how such text looks.
SHOWN = {
    "ini": "tests/deploy checks the unit",
    "dockerfile": "tests/deploy checks the Dockerfile",
    "toml": "the settings of another client",
}

# Programs that are not ours and are not run here.
ELSEWHERE = {
    "vllm": "another server",
    "llama-server": "another server",
    "transformers": "another server",
    "tritonserver": "another server",
    "llm": "another client",
    "claude": "another client",
    "lm_eval": "`make test-eval` runs it",
    "uvicorn": "tests/server/test_asgi_app.py runs it",
    "cmake": "`make test-native-sanitized` runs it",
    "clang-tidy": "large, and installed by whoever wants it",
    "pre-commit": "tests/deploy/test_hooks.py checks its hooks",
    "cd": "the shell's",
    "export": "the shell's",
    "echo": "the shell's",
    ".": "the shell's",
    "sudo": "changes the machine",
    "journalctl": "needs systemd",
    "git": "needs the network",
    "uvx": "`make rehearse-release` runs it",
    "docker": "needs a container engine",
    "kubectl": "needs a cluster",
    "kustomize": "needs a cluster",
    "helm": "tests/deploy/test_helm.py renders the chart",
    "gcloud": "needs an account",
    "serve": "tests/ray runs the application",
}
# Commands of ours of which only the arguments are read.
READ_ONLY: Mapping[str, str] = {
    "ostro models pull": "needs the network",
    "ostro models rm": "names what the reader has",
    "ostro models verify": "names what the reader has",
    "ostro stop": "tests/cli/test_ps.py stops servers",
    "ostro launch": "tests/agents starts agents, tests/cli/test_launch.py what stands for them",
    "ostro serve ./Qwen3-30B-A3B-Q4_0.gguf": "needs a GPU: tests/gpu/test_cpu_experts.py runs such models",
    "ostro simulate --measure": "tests/cli/test_simulate.py measures a model",
    "curl http://127.0.0.1:8001/prefill": "tests/server/test_handing_over.py asks a prefill server",
}
HELP = {"--help", "--help-all"}
# Where the docs mean a place that is not here.
OUTSIDE = re.compile(r"gs://|s3://|pypi:|…|\.\.\.|<[a-z-]+>")
# Packages that examples are for and that may be missing.
PACKAGES = {
    "anthropic": "tests/e2e asks by it, where it is installed",
    "langchain_openai": "tests/e2e asks by it, where it is installed",
    "lm_eval": "`make test-eval` installs it",
    "ray": "`make test-ray` installs it",
}
# Packages that take long to import: `make test-docs` runs their examples.
HEAVY = dict.fromkeys(("anthropic", "langchain_openai", "litellm"), "tests/e2e asks by it, too")
# Pages whose Python is run by other tests.
PYTHON_ELSEWHERE: Mapping[str, str] = {"docs/ray.md": "tests/ray, in `make test-ray`"}
# What a page leaves to the reader's imagination.
PRELUDES = {
    "docs/lora.md": 'messages = [{"role": "user", "content": "Hello"}]\n'
    'prompts, continuations, texts = ["a"], [" b"], ["c"]\n',
}
# Of YAML that is no file of settings: who reads it.
FOREIGN_KEYS = {"apiVersion", "services"}
FOREIGN_YAML = {
    "docs/evaluation.md": "lm_eval; `make test-eval` writes tasks of the same form",
    "docs/ray.md": "Serve, in `make test-ray`",
    "docs/client.md": "Continue",
}


def of_language(*languages: str) -> list[Block]:
    return [block for block in all_blocks() if block.language in languages]


def shell_commands() -> list[Command]:
    return [command for block in of_language(*SHELL) for command in commands(block)]


def of_program(*programs: str) -> list[Command]:
    return [command for command in shell_commands() if command.program in programs]


def name(what: Block | Command) -> str:
    return what.place if isinstance(what, Block) else f"{what.block.place}: {what.text[:60]}"


# --- everything is one of these -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", all_blocks(), ids=name)
def test_block_says_what_it_is(block: Block) -> None:
    assert block.language in (*SHELL, *OTHER_LANGUAGES, *SHOWN), "name its language: bash, python, …, or text"
    if block.language == "text":
        first = {line.split()[0] for line in block.text.splitlines() if line.split()}
        assert not first & {"ostro", "curl", "make", "pip", "$"}, "commands are bash, so that they are run"


@pytest.mark.parametrize("command", shell_commands(), ids=name)
def test_program_is_one_that_is_run_or_has_a_reason_not_to_be(command: Command) -> None:
    assert command.program in {"ostro", "curl", "make", "pip", "python", "python3", "bash", "run_server.sh", *ELSEWHERE}


# --- our own commands -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scratch(tmp_path_factory.mktemp("docs"))


@pytest.fixture(scope="module")
def server(scratch: Path) -> Iterator[LiveServer]:
    places = ("./my-model", "--models", "./models", "--lora", "french=./adapter", "--profile", "./profiles")
    with live_server(scratch, *places, "--load-timeout", "240", faults="") as live:
        yield live


@pytest.fixture
def here(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the scratch directory, with an environment in which the docs' variables are the only ones."""
    for variable in [each for each in os.environ if each.startswith("OSTRO_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OSTRO_CACHE", str(scratch / "cache"))
    monkeypatch.chdir(scratch)
    return scratch


def at_server(text: str, url: str) -> str:
    """The addresses of the docs' servers, of other ones too, as that of the one which is here."""
    host = url.removeprefix("http://")
    text = re.sub(r"http://(?:127\.0\.0\.1|localhost|other):(?:80\d\d|9000)", url, text)
    return re.sub(r"(?<![\w/])(?:127\.0\.0\.1|localhost):(?:80\d\d|9000)", host, text)


def arguments(command: Command) -> list[str]:
    """Those of `ostro`, of a model that is here."""
    words = [word.replace("model.gguf", "./my-model") for word in command.words[1:]]
    if words[0] in ("generate", "batch", "score") and "--model" not in words and "--help" not in words:
        words += ["--model", "./my-model"]
    if words[0] == "plan" and (len(words) == 1 or words[1].startswith("-")):
        words.insert(1, "./my-model")
    return words


def read_only(command: Command) -> bool:
    return OUTSIDE.search(command.text) is not None or command.text.startswith(tuple(READ_ONLY))


@pytest.mark.cases(46)
@pytest.mark.parametrize("command", of_program("ostro"), ids=name)
def test_arguments_are_known(command: Command) -> None:
    words = list(command.words[1:])
    if not HELP & set(words) and words != ["--version"]:
        _parser(words).parse_args(_translated(words))


@pytest.mark.cases(22)
@pytest.mark.parametrize("command", [each for each in of_program("ostro") if each.words[1] == "serve"], ids=name)
def test_settings_of_a_server_are_accepted(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in command.variables:
        monkeypatch.setenv(variable, value)
    words = [word for word in arguments(command) if word != "--dry-run"]
    if HELP & set(words):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
    else:
        assert main([*words, "--print-config"]) == 0, capsys.readouterr().err


def loadable() -> list[Command]:
    """Servers that name a model of the scratch directory, each once. The live server stands for those of places."""
    found: dict[tuple[str, ...], Command] = {}
    for command in of_program("ostro"):
        words = command.words[1:]
        named = len(words) > 1 and not words[1].startswith("-") and not command.variables
        needs_device = {"bfloat16", "fp8", "cuda", "tpu"} & set(words)
        if words[0] == "serve" and named and not needs_device and not read_only(command):
            found.setdefault(tuple(arguments(command)), command)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("command", loadable(), ids=name)
def test_server_loads_what_it_is_told_to(command: Command, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in arguments(command) if word != "--dry-run"]
    # The model that is here knows few positions.
    lengths = ("--max-seq-len", "--max-model-len", "--max-context-length")
    words = ["256" if before in lengths else word for before, word in zip(["", *words], words, strict=False)]
    assert main([*words, "--dry-run"]) == 0, capsys.readouterr().err


LOCAL = ("generate", "batch", "score", "plan", "recipe", "models", "simulate", "collect-env", "completion", "ps")
ASKING = ("compare", "bench", "chat")


@pytest.mark.cases(9)
@pytest.mark.parametrize(
    "command", [each for each in of_program("ostro") if each.words[1] in LOCAL and not read_only(each)], ids=name
)
def test_command_without_a_server_succeeds(command: Command, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(arguments(command))
    # What `plan` is asked may not fit on this machine, and then it says so.
    assert status == 0 or (status, command.words[1]) == (1, "plan"), capsys.readouterr().err


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "command", [each for each in of_program("ostro") if each.words[1] in ASKING and not read_only(each)], ids=name
)
def test_command_that_asks_a_server_succeeds(
    command: Command,
    here: Path,
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable, value in command.variables:
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    words = [at_server(word, server.url) for word in lighter(arguments(command))]
    if words[0] == "chat" and "--url" not in words and (len(words) == 1 or words[1].startswith("-")):
        words += ["--url", server.url]
    # There is no TGI here; what is ours answers in its place.
    assert main([word.replace("tgi+http", "ostro+http") for word in words]) == 0, capsys.readouterr().err


def lighter(words: list[str]) -> list[str]:
    """The same with fewer requests: that it works is in question here, not how fast."""
    few = {"--requests": "2", "--concurrency": "2", "--rate": "20", "--duration": "1", "--max-tokens": "4"}
    few |= {
        "--output-len": "4",
        "--input-len": "8",
        "--shared-prefix": "4",
        "--model-b": "my-model",
        "--model": "default",
    }
    found = [few.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if words[0] == "bench":
        found += () if "--url" in words else ("--url", "http://localhost:8000")
        found += ["--no-self-test", *(() if {"--requests", "--trace"} & set(words) else ("--requests", "2"))]
        found += () if {"--output-len", "--max-tokens", "--trace"} & set(words) else ("--max-tokens", "4")
        found += () if {"--prompt", "--prompts", "--input-len", "--trace"} & set(words) else ("--input-len", "8")
    return found


# --- other programs -------------------------------------------------------------------------------------------------


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "block", [b for b in of_language(*SHELL) if any(c.program == "curl" for c in commands(b))], ids=name
)
def test_curl_gets_an_answer(block: Block, server: LiveServer, scratch: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    for command in commands(block):
        if command.program == "curl" and not read_only(command):
            script = 'curl() { command curl -sS --fail-with-body --noproxy "*" "$@"; }\nset -o pipefail\n'
            line = at_server(command.line, server.url)
            ran = subprocess.run(
                ["bash", "-c", script + line], capture_output=True, text=True, check=False, cwd=scratch, timeout=240
            )
            assert ran.returncode == 0, f"{command.text}: {ran.stdout} {ran.stderr}"


@pytest.mark.parametrize("command", of_program("make"), ids=name)
def test_make_has_the_target(command: Command) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    assert set(asked) <= set(targets)
    for word in command.words[1:]:
        if asked == ["serve"] and word.startswith("ARGS="):
            words = ["serve", *word.removeprefix("ARGS=").split()]
            _parser(words).parse_args(_translated(words))


@pytest.mark.parametrize("command", of_program("pip"), ids=name)
def test_extras_that_are_installed_exist(command: Command) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in command.words:
        if found := re.fullmatch(r"(?:ostro|\.)\[([\w,-]+)\]", word):
            assert set(found[1].split(",")) <= set(extras)
        if word.endswith(".txt"):
            assert (ROOT / word).is_file()


@pytest.mark.parametrize("command", of_program("python", "python3", "bash", "run_server.sh"), ids=name)
def test_scripts_exist_and_know_their_options(command: Command) -> None:
    words = command.words if command.program.endswith(".sh") else command.words[1:]
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
        return
    script = ROOT / words[0]
    assert script.is_file()
    if script.name == "run_server.sh":
        _parser(["serve", *words[1:]]).parse_args(["serve", *words[1:]])
    text = script.read_text()
    for option in (word for word in words[1:] if word.startswith("--") and script.suffix == ".py"):
        assert f'"{option.partition("=")[0]}"' in text, f"{words[0]} has no {option}"


DEPLOYING = ("docker", "kubectl", "gcloud", "kustomize", "serve", "sudo", "cd")


@pytest.mark.parametrize("command", of_program(*DEPLOYING), ids=name)
def test_files_that_deployments_name_exist(command: Command) -> None:
    for option, word in pairwise(command.words):
        path = word.removeprefix("/opt/ostro/")
        names_file = option in ("-f", "-k", "--file", "--filename", "--env-file") or path.startswith("deploy/")
        # A .env is the reader's own.
        if names_file and "://" not in word and not word.startswith("-") and word != ".env":
            assert (ROOT / path).exists(), f"{command.text}: there is no {path}"
        if option == "--target":
            assert f" AS {word}\n" in (ROOT / "Dockerfile").read_text()
        if command.program == "serve" and (found := re.fullmatch(r"([\w.]+):\w+", word)):
            assert (ROOT / (found[1].replace(".", "/") + ".py")).is_file()


@pytest.mark.parametrize("command", [c for c in of_program("docker") if c.words[1] == "run"], ids=name)
def test_container_arguments_are_commands_of_ours(command: Command) -> None:
    image = next((place for place, word in enumerate(command.words) if re.fullmatch(r"ostro(:\w+)?", word)), None)
    if image is not None and (words := list(command.words[image + 1 :])):
        _parser(words).parse_args(_translated(words))


def test_variables_that_the_docs_name_are_read_by_somebody() -> None:
    settings = {PREFIX + each.upper() for each in ServeSettings.model_fields}
    sources = [path for place in ("src", "scripts", "deploy") for path in (ROOT / place).rglob("*") if path.is_file()]
    # What reads a variable may be a build or a container engine.
    sources += [ROOT / "pyproject.toml", *ROOT.glob("compose*.yaml")]
    text = "".join(path.read_text(errors="ignore") for path in sources if path.suffix not in (".pyc", ".png"))
    unread = set()
    for path in pages():
        for variable in re.findall(r"\bOSTRO_[A-Z][A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")):
            # Those of Ray are named after its options.
            option = variable.removeprefix("OSTRO_RAY_").lower() if variable.startswith("OSTRO_RAY_") else variable
            # Some end in what is filled in: `f"OSTRO_COMPARE_KEY_{side}"`.
            filled = option.rpartition("_")[0] + "_{"
            if variable not in settings and option not in text and filled not in text:
                unread.add(f"{variable} in {name_of(path)}")
    assert unread == set()


# --- code -----------------------------------------------------------------------------------------------------------

# Blocks of a page one after the other, in one namespace, as a reader would run them; all pages in one process.
RUNNER = """
import ast, asyncio, json, sys
for page, blocks in json.load(open(sys.argv[1])).items():
    names = {"__name__": "__main__"}
    for place, code in blocks:
        print("in", place, file=sys.stderr, flush=True)
        made = eval(compile(code, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if made is not None:
            asyncio.run(made)
"""


def imported(code: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(code)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("block", of_language("python"), ids=name)
def test_python_compiles_and_its_packages_are_known(block: Block) -> None:
    compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert {each for each in imported(block.text) if importlib.util.find_spec(each) is None} <= PACKAGES.keys()


@pytest.mark.full
def test_python_runs(server: LiveServer, scratch: Path) -> None:
    run_python([block for block in of_language("python") if not imported(block.text) & HEAVY.keys()], server, scratch)


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in of_language("python") if imported(b.text) & HEAVY.keys()], ids=name)
def test_python_with_large_packages_runs(block: Block, server: LiveServer, scratch: Path) -> None:
    run_python([block], server, scratch)


def run_python(chosen: list[Block], server: LiveServer, scratch: Path) -> None:
    by_page: dict[str, list[tuple[str, str]]] = {}
    for block in chosen:
        if all(importlib.util.find_spec(each) for each in imported(block.text)) and block.page not in PYTHON_ELSEWHERE:
            found = by_page.setdefault(block.page, [("prelude", PRELUDES.get(block.page, ""))])
            found.append((block.place, stand_in(at_server(block.text, server.url))))
    listed = scratch / "blocks.json"
    listed.write_text(json.dumps(by_page))
    ran = subprocess.run(
        [sys.executable, "-c", RUNNER, str(listed)],
        capture_output=True,
        text=True,
        check=False,
        cwd=scratch,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def stand_in(code: str) -> str:
    """Models of the network as those of the scratch directory."""
    return code.replace("LLM()", 'LLM("./my-model")').replace("org/base", "./base")


PACKAGE = 'from "'
# As much of a web page as examples write to.
BROWSER = "globalThis.document = { body: { append: (text) => process.stdout.write(String(text)) } };\n"


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in of_language("javascript", "js") if PACKAGE in b.text], ids=name)
def test_javascript_with_packages_runs(block: Block, server: LiveServer, tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    shutil.copy(ROOT / "tests/e2e/node/package.json", tmp_path)
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    if subprocess.run(install, cwd=tmp_path, capture_output=True, check=False, timeout=120).returncode:
        pytest.skip("npm cannot fetch the openai package here")
    script = tmp_path / "example.mjs"
    script.write_text(at_server(block.text, server.url))
    ran = subprocess.run(["node", str(script)], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout


@pytest.mark.full
@pytest.mark.parametrize("block", of_language("javascript", "js"), ids=name)
def test_javascript_runs(block: Block, server: LiveServer, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    script = tmp_path / "example.mjs"
    script.write_text(BROWSER + at_server(block.text, server.url))
    # What imports a package is run by `make test-docs`, which may install it.
    words = [node, "--check", str(script)] if PACKAGE in block.text else [node, str(script)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("block", of_language("yaml"), ids=name)
def test_yaml_is_a_file_of_settings_or_has_a_reader(block: Block, here: Path) -> None:
    documents = [each for each in yaml.safe_load_all(block.text) if each is not None]
    assert documents
    manifest = all(isinstance(each, dict) and FOREIGN_KEYS & each.keys() for each in documents)
    config = here / "block.yaml"
    config.write_text(block.text)
    if block.page == "docs/levanter.md":
        read_levanter_model(config)
    elif block.page not in FOREIGN_YAML and not manifest:
        read_settings({}, config=config, directory=here)


@pytest.mark.parametrize("block", of_language("json"), ids=name)
def test_json_is_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except ValueError:
        for line in block.text.splitlines():
            json.loads(line)


def test_every_command_is_shown_somewhere() -> None:
    shown = {command.words[1] for command in of_program("ostro")}
    assert COMMANDS.keys() - shown == set()


def test_reasons_are_for_commands_that_are_there() -> None:
    texts = [command.text for command in shell_commands()]
    assert ELSEWHERE.keys() - {command.program for command in shell_commands()} == set()
    assert SHOWN.keys() - {block.language for block in all_blocks()} == set()
    assert [start for start in READ_ONLY if not any(text.startswith(start) for text in texts)] == []
