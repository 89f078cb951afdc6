"""How many examples a property test tries: all in `make test-all`, an eighth of them in `make test`."""

import os

IS_FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"


def examples(number: int) -> int:
    """For `@settings(max_examples=examples(200))`."""
    return number if IS_FULL else -(-number // 8)
