"""Schemas, regexes and grammars written to hang the server, to fill its memory or to end its processes.

Each is refused or served. What is refused costs the process that checks it no more than its limits, which the kernel
enforces; what is served is compiled by the engine and followed for some tokens, and may fail its own sequence there.
"""

import json
import random
import resource
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from constrained_text import allowed, compiler
from live_server import LiveServer, live_server
from model_directory import write_model
from text_vocabs import byte_level

from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest, SequenceFailed
from ostro.grammar.checker import CheckLimits, GrammarChecker
from ostro.structured import StructuredOutput

# Quicker than the server's, so that a test is; what passes here passes there.
LIMITS = CheckLimits(seconds=0.3, bytes=256 << 20)


def schema(value: object) -> dict[str, str]:
    return {"json_schema": json.dumps(value)}


def nested(levels: int) -> object:
    return {"items": nested(levels - 1)} if levels else {}


def doubling(kind: str) -> dict[str, object]:
    """Each definition has the next one twice."""
    made: dict[str, object] = {f"d{n}": {kind: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    return {"$defs": made | {"d30": {"type": "string"}}, "$ref": "#/$defs/d0"}


def properties(count: int) -> dict[str, object]:
    return {f"p{number}": {"type": "string"} for number in range(count)}


def patterns(count: int) -> dict[str, object]:
    return {f"^p{number}$": {} for number in range(count)}


BOMBS: dict[str, dict[str, object]] = {
    # The table of what the compiler's own limits do not bound.
    **{
        f"multipleOf {n}": {**schema({"type": "integer", "multipleOf": n})} for n in (9_973, 99_991, 999_983, 7_999_993)
    },
    "multipleOf of two": {**schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (9_973, 9_967)]})},
    "multipleOf of decimals": {**schema({"type": "number", "multipleOf": 0.00099991})},
    **{f"{n} patternProperties": {**schema({"patternProperties": patterns(n)})} for n in (64, 200, 500)},
    **{f"{n} optional properties": {**schema({"properties": properties(n)})} for n in (500, 1_000, 5_000)},
    "5000 required properties": {**schema({"properties": properties(5000), "required": list(properties(5000))})},
    **{f"enum of {n}": {**schema({"enum": [f"v{i}" for i in range(n)]})} for n in (20_000, 30_000)},
    "allOf of anyOf": {**schema({"allOf": [{"anyOf": [{"const": f"{i}{j}"} for j in range(4)]} for i in range(12)]})},
    **{f"depth {n}": {**schema(nested(n))} for n in (60, 120, 900)},
    "pattern with a far choice": {**schema({"type": "string", "pattern": ".*a.{200}b"})},
    "ambiguous Lark": {"grammar": 'start: e\ne: e e | "a"'},
    **{f"regex (abc){{{n}}}": {"regex": f"(abc){{{n}}}"} for n in (10_000, 1_000_000)},
    # Others.
    "allOf that doubles": {**schema(doubling("allOf"))},
    "anyOf that doubles": {**schema(doubling("anyOf"))},
    "reference to itself": {**schema({"$ref": "#"})},
    "endless array": {**schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1})},
    "large counts": {**schema({"type": "array", "items": {"type": "string", "minLength": 10**9}, "minItems": 10**9})},
    "large bounds": {**schema({"type": "integer", "minimum": -(10**300), "maximum": 10**300})},
    "pattern that repeats": {**schema({"type": "string", "pattern": "(a{1000}){1000}"})},
    "pattern of characters": {**schema({"type": "string", "pattern": r"[\w\p{L}]{0,400}\b" * 9})},
    "remote reference": {**schema({"$ref": "http://127.0.0.1:1/schema.json"})},
    "nested repetitions": {"regex": "(((a{99}){99}){99}){99}"},
    "many stars": {"regex": "(a|b|ab)*" * 5_000},
    "nested groups": {"regex": "(" * 5_000 + "a" + ")" * 5_000},
    "stars of stars": {"regex": "((x+x+)+)+y"},
    "two long counts": {"regex": "[a-z]{1,9999}[0-9]{1,9999}"},
    "far choice": {"regex": ".*a.{400}b"},
    "optional Lark": {"grammar": "start: " + "a? " * 20_000 + '\na: "a"'},
    "long Lark chain": {"grammar": "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(9_000)) + 'a9000: "x"'},
    "GBNF that doubles": {
        "grammar": "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1} a{n + 1}\n" for n in range(40)) + 'a40 ::= "x"'
    },
    "long GBNF chain": {
        "grammar": "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(9_000)) + "a9000 ::= [x]"
    },
    "nested GBNF counts": {"grammar": "root ::= " + "(" * 60 + '"a"' + "){9999}" * 60},
    "long constant": {**schema({"const": "the fox " * 30_000})},
    "many choices": {"choice": [f"choice {number}" for number in range(18_000)]},
    "choices that begin one another": {"choice": ["a" * length for length in range(1, 600)]},
    "many tags": {
        "structural_tag": json.dumps(
            {"triggers": ["<"], "structures": [{"begin": f"<{n}>", "end": ""} for n in range(3_000)]}
        )
    },
}
# One of each kind; the others run with `make test-all` and `make test-hostile`.
QUICK = {
    *("multipleOf 7999993", "5000 optional properties", "enum of 20000", "ambiguous Lark", "regex (abc){1000000}"),
    *("long Lark chain", "pattern with a far choice"),
}
FULL = {
    *("multipleOf of two", "500 patternProperties", "500 optional properties", "nested repetitions", "depth 900"),
}


def marks(name: str) -> Sequence[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.full if name in FULL else pytest.mark.slow]


CASES = [pytest.param(fields, id=name, marks=marks(name)) for name, fields in BOMBS.items()]


def follow(constraint: Constraint, seed: int) -> None:
    """As the engine does, with a model of random taste."""
    matcher, draw = compiler().prepare(constraint).start(), random.Random(seed)
    for _ in range(60):
        if matcher.is_done:
            return
        token = draw.choice(sorted(allowed(matcher) or ()))
        if token in byte_level().eos_ids:
            return
        matcher.take(token)


def outcome(fields: dict[str, object]) -> Constraint | BadRequest:
    try:
        return GrammarChecker(byte_level(), limits=LIMITS).check(StructuredOutput(**fields))  # type: ignore[arg-type]
    except BadRequest as refusal:
        return refusal


@pytest.mark.parametrize("fields", CASES)
def test_a_hostile_structure_is_refused_or_served_within_its_limits(fields: dict[str, object]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = outcome(fields)
    if isinstance(found, BadRequest):
        assert found.param == next(iter(fields))
        assert "\n" not in found.message
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
        return
    for seed in range(2):
        # The sequence's failure, and nobody else's.
        with suppress(SequenceFailed):
            follow(found, seed)


class Neighbour(threading.Thread):
    """Asks the same question, as a stream, and probes the server, until it is told to stop."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__()
        self._server = server
        self._over = threading.Event()
        self.answers: list[str] = []
        self.probes: list[int] = []

    def run(self) -> None:
        body = {"prompt": "the quick", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
        with self._server.client() as client:
            while not self._over.is_set():
                events = client.post("/v1/completions", json=body).text.split("\n\n")
                chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
                self.answers.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
                self.probes.append(client.get("/healthz").status_code)

    def stop(self) -> None:
        self._over.set()
        self.join()


ASKED = [name for name in sorted(QUICK) if {"json_schema", "regex", "grammar"} & BOMBS[name].keys()]


def test_a_neighbours_streams_and_probes_go_on_while_hostile_structures_are_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    arguments = ("--model", str(tmp_path / "model"), "--threads", "1", "--kv-memory", "16M")
    with live_server(tmp_path, *arguments) as server, server.client() as client:
        neighbour = Neighbour(server)
        neighbour.start()
        try:
            answers = {
                name: client.post("/v1/completions", json={"prompt": "the", "max_tokens": 8, **BOMBS[name]})
                for name in ASKED
            }
            # What is refused is a mistake of whoever sent it, and the server goes on.
            good = client.post("/v1/completions", json={"prompt": "the", "max_tokens": 8, "regex": "[a-z]{3}"})
        finally:
            neighbour.stop()
    # A structure may also turn out too costly on the way, which fails its own sequence.
    odd = {name: each.text for name, each in answers.items() if each.status_code not in (200, 400)}
    assert all("cannot be held to its structure" in text for text in odd.values()), odd
    assert 400 in {each.status_code for each in answers.values()}
    assert len(good.json()["choices"][0]["text"]) == 3
    assert neighbour.answers
    assert len(set(neighbour.answers)) == 1
    assert neighbour.answers[0]
    assert set(neighbour.probes) == {200}
