"""The process that compiles users' grammars before the engine does, under the kernel's limits. See `checker`.

The compiler cannot be interrupted, and a failed allocation aborts its process.
"""

import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ostro.errors import BadRequest, Unsupported
from ostro.grammar.check import check_constraint, check_structured
from ostro.grammar.check_messages import Accepted, Check, Checked, Refused, Reply, Setup
from ostro.grammar.vocabulary import Vocabulary
from ostro.processes.worker_process import serve


class _Bytes:
    """A vocabulary of single bytes and the model's special tokens at their own ids, which is all that a grammar can
    refer to. It takes a fraction of the time and memory of the model's own vocabulary.
    """

    def __init__(self, setup: Setup) -> None:
        self.vocab_size = max(setup.vocab_size, 256 + len(setup.special_ids))
        self.eos_ids = frozenset(setup.eos_ids)
        self.special_ids = frozenset(setup.special_ids.values())
        self._tokens = {token: text.encode() for text, token in setup.special_ids.items()}
        free = (token for token in range(self.vocab_size) if token not in self._tokens)
        self._ids = {byte: next(free) for byte in range(256)}
        self._tokens |= {token: bytes([byte]) for byte, token in self._ids.items()}

    def token_bytes(self, id: int) -> bytes:
        return self._tokens.get(id, b"")

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> list[int]:
        return [self._ids[byte] for byte in text.encode()]


class _Checking:
    def __init__(self, setup: Setup) -> None:
        tokenizer = _Bytes(setup)
        self._special_ids = setup.special_ids
        self._tokenizer = Vocabulary(tokenizer, tokenizer.vocab_size).tokenizer

    def reply(self, message: bytes) -> bytes:
        began = time.process_time()
        reply = self._checked(msgspec.msgpack.decode(message, type=Check))
        return msgspec.msgpack.encode(Checked(reply, time.process_time() - began))

    def _checked(self, asked: Check) -> Reply:
        try:
            if asked.structured is not None:
                return Accepted(check_structured(asked.structured, self._special_ids, self._tokenizer))
            assert asked.constraint is not None
            check_constraint(asked.constraint, self._tokenizer)
            return Accepted(asked.constraint)
        except BadRequest as error:
            # Only the caller knows which parameter a constraint was built from.
            param = None if asked.structured is None else error.param
            return Refused(error.message, param, isinstance(error, Unsupported))


# Half the stack of an engine thread: a grammar that recurses too deeply crashes this process, not the engine.
_STACK_BYTES = 4 << 20


def begin(setup: bytes) -> Callable[[bytes], bytes]:
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
    return _Checking(msgspec.msgpack.decode(setup, type=Setup)).reply


if __name__ == "__main__":
    serve(int(sys.argv[1]), begin, in_forks=True)
