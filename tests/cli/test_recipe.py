"""ostro recipe: names, the nearest ones, the command for a device, and what programs read."""

import json
import subprocess
import sys

import pytest
from native_models import needs_library
from warm_start import warm_run

from ostro.cli import main
from ostro.cli.completion import commands
from ostro.recipes import DEVICES, recipe_names, recipes


def told(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["recipe", *words]) == status
    found = capsys.readouterr()
    return found.out if status == 0 else found.err


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = told(capsys).splitlines()
    assert head.split() == ["RECIPE", "MODEL", "LICENCE", "DEVICES"]
    assert [row.split()[0] for row in rows] == recipe_names()


def test_list_may_be_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    rows = told(capsys, "--device", "cpu-256gb").splitlines()[1:]
    assert {row.split()[0] for row in rows} == {
        name for name, recipe in recipes().items() if recipe.setup("cpu-256gb") is not None
    }


def test_recipe_has_a_command_for_each_device_and_what_to_expect(capsys: pytest.CaptureFixture[str]) -> None:
    page = told(capsys, "qwen3-14b")
    assert "  ostro serve Qwen/Qwen3-14B --quantize int4\n" in page
    assert "RTX 4090, 24 GB:\n  ostro serve Qwen/Qwen3-14B --quantize fp8\n  15.2 GiB of weights" in page
    assert "sequences of up to 15,360 tokens" in page
    for label in ("sampling:  temperature 0.6", "tools:     --tool-format hermes", "reasoning: <think>", "measured:"):
        assert label in page


def test_device_is_the_only_one_shown(capsys: pytest.CaptureFixture[str]) -> None:
    page = told(capsys, "qwen3-14b", "--device", "h100")
    assert page.count("ostro serve") == 1
    assert DEVICES["h100"].label in page


def test_models_own_names_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "Qwen/Qwen3-8B") == told(capsys, "QWEN3-8b")


def test_device_that_the_model_is_too_large_for_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "too large for:" in told(capsys, "gpt-oss-120b")
    error = told(capsys, "gpt-oss-120b", "--device", "rtx-4090", status=2)
    assert error == "ostro: gpt-oss-120b does not fit on rtx-4090. The recipe has cpu-256gb.\n"
    error = told(capsys, "qwen3-8b", "--device", "cpu-256gb", status=2)
    assert error == (
        "ostro: The recipe qwen3-8b has no setup for cpu-256gb, because a smaller device will do. The recipe has "
        "cpu-16gb, rtx-4090, h100, h200.\n"
    )


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("qwen3", "Did you mean qwen3-0.6b or qwen3-1.7b or qwen3-14b? "),
        ("gpt-os-20b", "Did you mean gpt-oss-20b"),
        ("mistralai/mistral-smal-3.1", "Did you mean mistral-small-3.1"),
        ("zzz", "`ostro recipe` lists them."),
    ],
)
def test_unknown_name_gets_the_nearest_ones(wanted: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = told(capsys, wanted, status=2)
    assert error.startswith(f"ostro: There is no recipe {wanted!r}. ")
    assert meant in error


def test_unknown_device_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["recipe", "qwen3-8b", "--device", "h10"])
    assert left.value.code == 2
    assert "Did you mean h100" in capsys.readouterr().err


def test_json_has_the_commands_and_sizes_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(capsys, "llama-3.3-70b", "--json"))
    recipe = recipes()["llama-3.3-70b"]
    assert found["config"] == recipe.config
    assert [each["command"] for each in found["setups"]] == [recipe.command(each) for each in recipe.setups]
    assert found["setups"][0]["plan"]["weights"] == recipe.setups[0].plan.weights
    [only] = json.loads(told(capsys, "llama-3.3-70b", "--json", "--device", "h200"))["setups"]
    assert only["command"] == "ostro serve meta-llama/Llama-3.3-70B-Instruct --quantize fp8"
    assert [each["name"] for each in json.loads(told(capsys, "--json"))] == recipe_names()


@needs_library
def test_recipe_expects_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the one model that is at hand without a download."""
    words = ["plan", "smollm2-135m", "--json", *DEVICES["rtx-4090"].options.split()]
    assert main(words) == 0
    planned = json.loads(capsys.readouterr().out)
    setup = recipes()["smollm2-135m"].setup("rtx-4090")
    assert setup is not None
    assert (planned["total_bytes"], planned["num_pages"]) == (setup.plan.total, setup.plan.pages)


def test_completion_offers_the_names() -> None:
    [command] = [each for each in commands() if each.path == "recipe"]
    assert command.place is not None
    assert command.place.choices == tuple(recipe_names())
    [device] = [each for each in command.options if "--device" in each.flags]
    assert device.values is not None
    assert device.values.choices == tuple(DEVICES)


def test_recipe_needs_neither_torch_nor_numpy() -> None:
    code = "import sys\nfrom ostro.cli import main\nmain(['recipe', 'qwen3-8b'])\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "jax", "numpy", "pydantic"} & set(ran.stdout.splitlines()[-1].split())


def test_help_shows_how_to_ask() -> None:
    shown = warm_run(
        ["recipe", "--help"], environment={"COLUMNS": "80", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "ostro recipe qwen3-8b --device rtx-4090" in shown.stdout
