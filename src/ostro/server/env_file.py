"""Values of variables that came by an env-file. `docker run --env-file` and `kubectl create configmap --from-env-file`
hand over all that stands after `=`, with its quotes and comments; `.env` files, Compose and systemd take those away.
"""

import re

from ostro.errors import BadRequest

_COMMENT = re.compile(r"\s#(\s|$)")


def as_in_dotenv(variable: str, value: str) -> str:
    """What a `.env` file would make of the value: without quotes around it.

    Raises BadRequest for one that ends in a comment: no setting has ` # ` in it, and a guess at where a key ends is
    worse.
    """
    bare = value.strip()
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "\"'":
        return bare[1:-1]
    if _COMMENT.search(value):
        raise BadRequest(
            f"{variable} in the environment ends in a comment, as docker's --env-file leaves it there. "
            "Put the comment on a line of its own."
        )
    return value
