"""The process that checks grammars: what it gives, what it may use, and what is kept of it."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from constrained_text import constraint_of
from text_vocabs import byte_level, control_ids

from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest, Unavailable, Unsupported
from ostro.grammar.checker import CheckLimits, GrammarChecker
from ostro.structured import StructuredOutput

OBJECT = StructuredOutput(json_object=True)
NOT = StructuredOutput(json_schema='{"properties": {"a": {"not": {}}}}')
# Seconds to compile, and the linter sees nothing wrong with it.
SLOW = StructuredOutput(
    json_schema=json.dumps({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]})
)
QUICK = CheckLimits(seconds=0.2)


def test_check_and_check_async_return_the_enforced_grammar() -> None:
    fields: list[dict[str, object]] = [
        {"json_schema": '{"type": "integer"}', "jump_forward": True},
        {"choice": ["yes", "nö"]},
        {"regex": "a+"},
        {"grammar": 'root ::= "a"'},
        {"structural_tag": '{"triggers": ["<|im_end|>"], "structures": [{"begin": "<|im_end|>x", "end": ""}]}'},
    ]
    asked = [StructuredOutput(**each) for each in fields]  # type: ignore[arg-type]
    expected = [constraint_of(**each) for each in fields]
    checker = GrammarChecker(byte_level())
    assert [checker.check(structured) for structured in asked] == expected

    async def scenario() -> None:
        other = GrammarChecker(byte_level())
        assert [await other.check_async(structured) for structured in asked] == expected

    asyncio.run(scenario())


def test_refusals_keep_their_kind_their_words_and_their_field() -> None:
    checker = GrammarChecker(byte_level())
    for _ in range(2):
        with pytest.raises(Unsupported, match="not at #/properties/a/not is not supported") as refusal:
            checker.check(NOT)
        assert refusal.value.param == "json_schema"


@pytest.mark.full
def test_outcomes_are_kept_refusals_too() -> None:
    checker = GrammarChecker(byte_level(), limits=QUICK)
    accepted = checker.check(OBJECT)
    for structured in (NOT, SLOW):
        with pytest.raises(BadRequest):
            checker.check(structured)
    checker.close()
    assert checker.check(OBJECT) == accepted
    assert asyncio.run(checker.check_async(OBJECT)) == accepted
    for structured in (NOT, SLOW):
        with pytest.raises(BadRequest):
            checker.check(structured)
    with pytest.raises(Unavailable):
        checker.check(replace(OBJECT, jump_forward=True))


@pytest.mark.full
def test_structure_that_takes_too_long_is_refused_and_the_next_is_checked() -> None:
    checker = GrammarChecker(byte_level(), limits=QUICK)
    with pytest.raises(BadRequest, match=r"json_schema takes more than 0\.2 s to compile") as refusal:
        checker.check(SLOW)
    assert refusal.value.param == "json_schema"
    assert checker.check(OBJECT).grammar


@pytest.mark.full
def test_structure_that_takes_too_much_memory_is_refused_and_the_next_is_checked() -> None:
    checker = GrammarChecker(byte_level(), limits=CheckLimits(seconds=60, bytes=128 << 20))
    large = StructuredOutput(regex="(((abc){90}){90}){90}")
    with pytest.raises(BadRequest, match="regex takes more than 128 MiB of memory to compile"):
        checker.check(large)
    assert checker.check(OBJECT).grammar


@pytest.mark.full
def test_structure_that_recurses_too_deeply_is_refused() -> None:
    """The library overflows its stack."""
    rules = "".join(f"a{number} ::= a{number + 1}\n" for number in range(9000))
    with pytest.raises(BadRequest, match="grammar takes more than the compiler has"):
        GrammarChecker(byte_level()).check(StructuredOutput(grammar=f"root ::= a0\n{rules}a9000 ::= [x]"))


@pytest.mark.full
def test_waiters_for_the_same_check_share_its_outcome() -> None:
    checker = GrammarChecker(byte_level(), limits=QUICK)

    async def first() -> None:
        with pytest.raises(BadRequest):
            await checker.check_async(SLOW)
        # Who asks the process now hears that it is closed.
        checker.close()

    async def later() -> None:
        with pytest.raises(BadRequest, match="takes more than"):
            await checker.check_async(SLOW)

    async def scenario() -> None:
        await asyncio.gather(first(), later(), later())

    asyncio.run(scenario())


@pytest.mark.full
def test_the_event_loop_goes_on_while_a_schema_is_checked() -> None:
    checker = GrammarChecker(byte_level(), limits=QUICK)

    async def scenario() -> None:
        check = asyncio.create_task(checker.check_async(SLOW))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not check.done()
        with pytest.raises(BadRequest):
            await check

    asyncio.run(scenario())


def slow(number: int) -> StructuredOutput:
    return replace(SLOW, json_schema=(SLOW.json_schema or "").replace("}", f', "title": "{number}"}}', 1))


@pytest.mark.full
def test_a_small_schema_overtakes_slow_ones_that_came_before_it() -> None:
    checker = GrammarChecker(byte_level(), limits=CheckLimits(seconds=60))

    async def scenario() -> None:
        slow_ones = [asyncio.create_task(checker.check_async(slow(number))) for number in range(3)]
        await asyncio.sleep(0)
        assert (await checker.check_async(OBJECT)).grammar
        assert not any(each.done() for each in slow_ones)
        checker.close()
        ended = await asyncio.gather(*slow_ones, return_exceptions=True)
        assert {type(each) for each in ended} == {Unavailable}

    asyncio.run(scenario())


@pytest.mark.full
def test_what_is_checked_at_once_shares_its_time() -> None:
    limits = CheckLimits(seconds=0.1, together_seconds=0.1)
    checker = GrammarChecker(byte_level(), limits=limits)

    async def scenario() -> None:
        known = await checker.check_async(OBJECT)
        found = await checker.check_all_async([NOT, slow(1), slow(2), NOT, OBJECT, StructuredOutput(regex="a")])
        messages = [each.message if isinstance(each, BadRequest) else each for each in found]
        assert found[4] == known
        assert "json_schema takes more than 0.1 s" in str(messages[1])
        assert "json_schema was not checked" in str(messages[2])
        assert messages[0] == messages[3]
        assert "not at #/properties/a/not" in str(messages[0])
        assert isinstance(found[5], BadRequest)
        assert found[5].param == "regex"
        # The next request has its own time, and the first one's outcomes.
        [again, small] = await checker.check_all_async([slow(1), StructuredOutput(regex="a")])
        assert isinstance(again, BadRequest)
        assert isinstance(small, Constraint)

    asyncio.run(scenario())


def test_outcomes_of_many_agents_tools_are_kept() -> None:
    checker = GrammarChecker(byte_level())
    schemas = [StructuredOutput(json_schema=json.dumps({"const": number})) for number in range(260)]
    first = asyncio.run(checker.check_all_async(schemas))
    checker.close()
    assert asyncio.run(checker.check_all_async(schemas)) == first


def test_a_process_that_is_killed_is_not_the_schemas_fault() -> None:
    checker = GrammarChecker(byte_level(), limits=CheckLimits(seconds=60, quick_seconds=60))

    async def scenario() -> None:
        check = asyncio.create_task(checker.check_async(SLOW))
        while not checker.pids:
            await asyncio.sleep(0.01)
        for pid in checker.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="Try again"):
            await check
        assert (await checker.check_async(OBJECT)).grammar

    asyncio.run(scenario())


@pytest.mark.full
def test_a_grammar_that_runs_out_of_time_costs_no_new_process() -> None:
    checker = GrammarChecker(byte_level(), limits=CheckLimits(seconds=0.1))
    checker.check(OBJECT)
    [quick] = checker.pids
    for number in (1, 2):
        with pytest.raises(BadRequest, match=r"takes more than 0\.1 s"):
            checker.check(slow(number))
    assert checker.pids[0] == quick
    assert checker.check(StructuredOutput(regex="a")).grammar


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_closed_or_forgotten_checker_leaves_no_process() -> None:
    for close in (True, False):
        checker = GrammarChecker(byte_level())
        assert not checker.pids
        checker.check(OBJECT)
        [pid] = checker.pids
        fork = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        if close:
            checker.close()
        del checker
        gc.collect()
        assert not Path(f"/proc/{pid}").exists()
        deadline = time.monotonic() + 60
        while is_running(fork):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def tool(schema: object) -> Constraint:
    end, _ = control_ids()
    return Constraint(grammar=f"start: /[a-z]*/ <[{end}]> %json {json.dumps(schema)}\n", lazy=True)


@pytest.mark.full
def test_a_grammar_that_was_made_elsewhere_is_checked_with_the_schemas_in_it() -> None:
    checker = GrammarChecker(byte_level(), limits=QUICK)
    checker.check_constraint(tool({"type": "integer"}), "tools")
    refused: tuple[tuple[dict[str, object], str], ...] = (
        ({"items": {"not": {}}}, "not at #/items/not is not supported"),
        ({"type": "integer", "multipleOf": 99_991}, "multipleOf at #/multipleOf"),
        (json.loads(SLOW.json_schema or ""), "tools takes more than"),
        ({"type": "strin"}, "strin"),
    )
    for schema, named in refused:
        with pytest.raises(BadRequest, match=named) as refusal:
            checker.check_constraint(tool(schema), "tools")
        assert refusal.value.param == "tools"

    async def scenario() -> None:
        other = GrammarChecker(byte_level(), limits=QUICK)
        for schema, named in refused:
            with pytest.raises(BadRequest, match=named):
                await other.check_constraint_async(tool(schema), "tools")

    asyncio.run(scenario())


@pytest.mark.full
def test_without_the_library_everything_imports_and_a_check_says_what_to_install() -> None:
    code = """
import sys
sys.modules["llguidance"] = None
from ostro.grammar.checker import GrammarChecker
from ostro.grammar.compiler import GrammarCompiler
from ostro.engine.constraint import Constraint
from ostro.errors import Unsupported
from ostro.structured import StructuredOutput
from text_vocabs import byte_level
for ask in (
    lambda: GrammarChecker(byte_level()).check(StructuredOutput(json_object=True)),
    lambda: GrammarCompiler(byte_level, byte_level().vocab_size).prepare(Constraint(grammar="start: /a/")),
):
    try:
        ask()
    except Unsupported as error:
        print(error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.count("Run: pip install llguidance") == 2
