"""What each coding agent needs to use a server: its program, variables, arguments and files. Runs nothing.

An agent gets its settings for one run, by variables, arguments and files of our own. Those of its user stay as they
are.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_NO_KEY = "none"
_KEY_VARIABLE = "OSTRO_API_KEY"
# As much of a context as an answer may take, and what agents ask for at most.
_OUTPUT_SHARE, _MOST_OUTPUT = 4, 32_000
# Claude Code takes no smaller window than this for when it compacts a conversation, but a share of it.
_LEAST_WINDOW = 100_000
_COMPACT_PERCENT = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The model that an agent uses."""

    url: str
    """The server's, without /v1."""
    model: str
    key: str | None
    context: int | None
    """The most tokens of a prompt and its answer; None if the server does not tell."""

    @property
    def output(self) -> int | None:
        """The most tokens of an answer, so that the prompt has room."""
        return None if self.context is None else min(_MOST_OUTPUT, max(1, self.context // _OUTPUT_SHARE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How an agent is started."""

    arguments: tuple[str, ...] = ()
    """They come before those of its user."""
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Variables that would send it elsewhere."""
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    title: str
    program: str
    package: str
    """Name of its npm package."""
    prompt_tokens: int
    """What its first prompt takes, before any word of the user, roughly."""
    prepare: Callable[[Endpoint, Path], Preparation]
    """Given a directory for its files."""


def _codex(endpoint: Endpoint, directory: Path) -> Preparation:
    provider = {"name": "Ostro", "base_url": f"{endpoint.url}/v1", "wire_api": "responses"}
    if endpoint.key is not None:
        provider["env_key"] = _KEY_VARIABLE
    settings = {"model": _toml(endpoint.model), "model_provider": _toml("ostro")}
    settings |= {f"model_providers.ostro.{name}": _toml(value) for name, value in provider.items()}
    if endpoint.context is not None:
        settings["model_context_window"] = str(endpoint.context)
    return Preparation(
        arguments=tuple(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
        variables={} if endpoint.key is None else {_KEY_VARIABLE: endpoint.key},
    )


def _claude(endpoint: Endpoint, directory: Path) -> Preparation:
    sizes = ("HAIKU", "SONNET", "OPUS")
    variables = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key or _NO_KEY,
        "ANTHROPIC_MODEL": endpoint.model,
        **{f"ANTHROPIC_DEFAULT_{each}_MODEL": endpoint.model for each in sizes},
        "CLAUDE_CODE_SUBAGENT_MODEL": endpoint.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if endpoint.context is not None:
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(endpoint.output)
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(max(endpoint.context, _LEAST_WINDOW))
        if endpoint.context < _LEAST_WINDOW:
            percent = max(1, _COMPACT_PERCENT * endpoint.context // _LEAST_WINDOW)
            variables["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(percent)
    elsewhere = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_VERTEX")
    return Preparation(variables=variables, unset=elsewhere)


def _opencode(endpoint: Endpoint, directory: Path) -> Preparation:
    model: dict[str, object] = {"name": endpoint.model}
    if endpoint.context is not None:
        model["limit"] = {"context": endpoint.context, "output": endpoint.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Ostro",
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.key or _NO_KEY},
        "models": {endpoint.model: model},
    }
    name = f"ostro/{endpoint.model}"
    settings = {"model": name, "small_model": name, "provider": {"ostro": provider}}
    return Preparation(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _continue(endpoint: Endpoint, directory: Path) -> Preparation:
    model: dict[str, object] = {
        "name": endpoint.model,
        "provider": "openai",
        "model": endpoint.model,
        "apiBase": f"{endpoint.url}/v1",
        "apiKey": endpoint.key or _NO_KEY,
    }
    if endpoint.context is not None:
        model["defaultCompletionOptions"] = {"contextLength": endpoint.context, "maxTokens": endpoint.output}
    path = directory / "config.yaml"
    # JSON is YAML, too.
    settings = {"name": "Ostro", "version": "1.0.0", "schema": "v1", "models": [model]}
    return Preparation(arguments=("--config", str(path)), files={path: json.dumps(settings, indent=2) + "\n"})


def _toml(text: str) -> str:
    # A basic string of TOML has JSON's escapes.
    return json.dumps(text)


AGENTS: Mapping[str, Agent] = {
    "codex": Agent(title="Codex", program="codex", package="@openai/codex", prompt_tokens=9_600, prepare=_codex),
    "claude": Agent(
        title="Claude Code",
        program="claude",
        package="@anthropic-ai/claude-code",
        prompt_tokens=21_000,
        prepare=_claude,
    ),
    "opencode": Agent(
        title="opencode", program="opencode", package="opencode-ai", prompt_tokens=7_700, prepare=_opencode
    ),
    "continue": Agent(
        title="Continue", program="cn", package="@continuedev/cli", prompt_tokens=1_400, prepare=_continue
    ),
}
