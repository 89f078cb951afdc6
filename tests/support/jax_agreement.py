"""One process of a mesh over several, which asks the others whether they have the same facts, and prints what it hears.

python jax_agreement.py FACTS    a JSON object, with JAX's environment of a process
"""

import json
import sys

from ostro.backends.jax.hosts import agree, join_hosts
from ostro.errors import BadRequest


def main(facts: str) -> None:
    join_hosts()
    try:
        agree("settings", json.loads(facts))
        print("agreed", flush=True)
        agree("settings", json.loads(facts))
    except BadRequest as error:
        print(error.message, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
