"""Grammars over token ids for tests of the engine: finite automata, written as JSON in a constraint's `grammar`.

    {"edges": {"0": {"3": 1, "5": 2}, …}, "ends": [2], "free": [4], "traps": [7]}

Each state has its tokens and where they lead; the first state is 0. In a state of `ends` the output may end, in one of
`free` any token may come and one without an edge stays there, and in one of `traps` the matcher fails.
"""

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Self

from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest, SequenceFailed

EOS = 3
"""Token that ends an output where the grammar allows it."""


@dataclass(frozen=True)
class Automaton:
    edges: Mapping[int, Mapping[int, int]]
    ends: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()
    traps: frozenset[int] = frozenset()
    vocab_size: int = 1000
    jumps: bool = False

    def start(self) -> "AutomatonMatcher":
        return AutomatonMatcher(self)


class AutomatonMatcher:
    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._state = 0

    def copy(self) -> Self:
        return copy(self)

    def mask(self) -> memoryview | None:
        self._check()
        automaton = self._automaton
        if self._state in automaton.free:
            return None
        words = bytearray(4 * (automaton.vocab_size // 32 + 1))
        for token in (*automaton.edges.get(self._state, {}), *((EOS,) if self._state in automaton.ends else ())):
            words[token >> 3] |= 1 << (token & 7)
        return memoryview(words)

    def take(self, token_id: int) -> None:
        automaton = self._automaton
        if self._state in automaton.free:
            self._state = automaton.edges.get(self._state, {}).get(token_id, self._state)
        elif token_id in automaton.edges.get(self._state, {}):
            self._state = automaton.edges[self._state][token_id]
        else:
            raise SequenceFailed(f"State {self._state} has no token {token_id}.")

    def forced(self) -> list[int]:
        automaton, state, found = self._automaton, self._state, list[int]()
        while automaton.jumps and len(edges := automaton.edges.get(state, {})) == 1 and len(found) < 50:
            if state in automaton.ends | automaton.free | automaton.traps:
                break
            [(token, state)] = edges.items()
            found.append(token)
        return found

    @property
    def is_done(self) -> bool:
        state = self._state
        return not self._automaton.edges.get(state) and state not in self._automaton.free | self._automaton.traps

    @property
    def is_free(self) -> bool:
        return self._state in self._automaton.free

    def _check(self) -> None:
        if self._state in self._automaton.traps:
            raise SequenceFailed(f"State {self._state} is a trap.")


class ScriptedGrammars:
    """Compiles constraints as an engine's own grammars do."""

    def __init__(self, vocab_size: int = 1000) -> None:
        self.vocab_size = vocab_size

    def prepare(self, constraint: Constraint) -> Automaton:
        try:
            script = json.loads(constraint.grammar)
        except ValueError as error:
            raise BadRequest(f"The grammar does not compile ({error}).", param="structured") from error
        return Automaton(
            {int(at): {int(token): to for token, to in edges.items()} for at, edges in script["edges"].items()},
            frozenset(script.get("ends", ())),
            frozenset(script.get("free", ())),
            frozenset(script.get("traps", ())),
            vocab_size=self.vocab_size,
            jumps=constraint.jump_forward,
        )


def scripted(
    edges: Mapping[int, Mapping[int, int]],
    *,
    ends: tuple[int, ...] = (),
    free: tuple[int, ...] = (),
    traps: tuple[int, ...] = (),
    jump_forward: bool = False,
) -> Constraint:
    script = {"edges": edges, "ends": ends, "free": free, "traps": traps}
    return Constraint(grammar=json.dumps(script), jump_forward=jump_forward)
