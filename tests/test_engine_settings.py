"""An engine setting stands once, in EngineConfig: the server and the commands take what is declared there."""

import argparse
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from ostro.cli.options import add_engine_options, add_plan_options, engine_config
from ostro.config import KINDS, PREFIX, SETTINGS, EngineConfig, Size
from ostro.server.settings import ENGINE_SETTINGS, read_settings

IN_COMMANDS = [name for name, each in SETTINGS.items() if each.in_commands]
# Settings that are only taken with another one.
NEEDED = {"kv_disk_size": {"kv_disk": "/pages"}, "kv_shared_size": {"kv_shared": "/pages"}}


def example(kind: Any) -> tuple[str, object]:
    """A text for a setting of this type, and the value that it stands for."""
    if kind == Size:
        return "2G", 2 << 30
    if get_origin(kind) is Literal:
        return (get_args(kind)[-1],) * 2
    if get_origin(kind) in (Union, UnionType):
        return example(get_args(kind)[0])
    return {int: ("2", 2), float: ("0.5", 0.5), str: ("some", "some")}[kind]


@pytest.mark.parametrize("name", ENGINE_SETTINGS)
def test_the_server_takes_it_from_the_environment_and_hands_it_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_switch = KINDS[name] is bool
    text, value = (str(not SETTINGS[name].default), not SETTINGS[name].default) if is_switch else example(KINDS[name])
    for variable, given in ({name: text} | NEEDED.get(name, {})).items():
        monkeypatch.setenv(PREFIX + variable.upper(), given)
    assert getattr(read_settings({}, directory=tmp_path).settings.engine(), name) == value


@pytest.mark.parametrize("name", IN_COMMANDS)
def test_commands_take_it_as_an_option(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    flag = name.replace("_", "-")
    if KINDS[name] is bool:
        words = [f"--no-{flag}" if SETTINGS[name].default else f"--{flag}"]
        value: object = not SETTINGS[name].default
    else:
        text, value = example(KINDS[name])
        words = [f"--{flag}", text]
    words += [word for other, text in NEEDED.get(name, {}).items() for word in (f"--{other.replace('_', '-')}", text)]
    assert getattr(engine_config(parser.parse_args(words)), name) == value


def test_options_that_are_left_out_are_the_engines_defaults() -> None:
    for add in (add_engine_options, add_plan_options):
        parser = argparse.ArgumentParser()
        add(parser)
        assert engine_config(parser.parse_args([])) == EngineConfig()
