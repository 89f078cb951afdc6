"""All of Ostro's deliberate errors, as one tree. Each class has an HTTP status, and an OpenAI type and code.

    OstroError
    ├── BadRequest                    400  the caller can fix it
    │   ├── ContextLengthExceeded     400  prompt and output together exceed the model's context length
    │   ├── PreviousResponseUnknown   400  the response to continue is not stored here
    │   ├── RequestRefused            400  it crashed the engine more than once
    │   ├── StructureFailed           400  its schema or grammar became too costly to follow
    │   ├── NothingAllowed            400  its own settings ban every token
    │   └── Unsupported               400  the loaded model or this build cannot do what was requested
    ├── NotAuthorized                 401  no key, or one that is not valid here
    ├── NotAllowed                    403  this caller may not do it, whatever else they send
    ├── UnknownResponse               404  no stored response has the requested id
    ├── ModelNotFound                 503  a model's files are not where they should be
    │   └── UnknownModel              404  no model has the requested name
    ├── BodyTimeout                   408  a request's body arrived too slowly
    ├── BodyTooLarge                  413  a request's body exceeds the size limit
    ├── WrongContentType              415  a request's body is not declared as JSON
    ├── ModelError                    500  the model was found but cannot be served
    │   ├── BadCheckpoint             500  a weights, config or tokenizer file is damaged or malformed
    │   └── UnsupportedModel          500  an unknown architecture or quantisation
    ├── TryLater                      503  temporarily not possible: retry in a moment
    │   ├── QueueFull                 429  too many requests are already waiting
    │   ├── TooManyAttempts           429  too many wrong keys from one address
    │   └── Unavailable               503  loading, draining, or the engine is down
    ├── RequestTimeout                504  the request exceeded its time limit
    ├── DownloadFailed                502  a source could not deliver the model's files
    ├── DiskFull                      507  no room to store the model's files
    ├── SequenceFailed                500  the engine gave up on one sequence; others continue
    ├── ProfileFailed                 500  a profile could not be recorded or written
    └── ServerError                   502  another server, called over HTTP, did not answer properly
        ├── Unreachable               502  nothing listens there, or the connection broke
        └── BadAnswer                 502  its answer was malformed

A message is one line: what is wrong, then what to do about it. Messages that may reveal locations on the server are
reduced for clients: why a model cannot be served mentions files by base name only, and failures of a source or disk
become the class's `general` text.
"""

import errno
import re
from typing import ClassVar

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of the operating system for a full disk."""

# A path or a URL, including spaces as long as slashes follow.
_PLACE = re.compile(r"(?<![\w/])(?:\w+://|[~.]{0,2}/)[^\s'\"]*(?: [^\s'\"/]+/[^\s'\"]*)*")


def without_places(message: str) -> str:
    """The message with each path and URL reduced to its last part: a file's name without its location."""

    def last_part(match: re.Match[str]) -> str:
        place = match[0].rstrip("/.,;:)")
        rest = match[0][len(place) :]
        if "://" in place:
            # Strips credentials and query strings.
            place = re.split(r"[?#]", place, maxsplit=1)[0].rstrip("/").rpartition("@")[2]
        return place.rpartition("/")[2] + rest

    return _PLACE.sub(last_part, message)


class OstroError(Exception):
    """Base of all deliberate errors; the message can be shown as is to a user of this machine."""

    http_status = 500
    openai_type = "server_error"
    openai_code: str | None = None
    general: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def public(self) -> str:
        """The message for clients."""
        return self.general or self.message


class BadRequest(OstroError):
    http_status = 400
    openai_type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    openai_code = "context_length_exceeded"

    def __init__(self, *, limit: int, prompt: int, output: int, param: str = "prompt") -> None:
        """`param` is the caller's name for the prompt: prompt, messages or input."""
        if output:
            asked = f"{prompt + output} tokens ({prompt} in the prompt, {output} to generate)"
            cure = "Shorten the prompt or lower max_tokens."
        else:
            asked, cure = f"{prompt} tokens in the prompt", "Shorten the prompt."
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but you asked for {asked}. {cure}",
            param=param,
        )
        self.limit, self.prompt, self.output = limit, prompt, output


class PreviousResponseUnknown(BadRequest):
    openai_code = "previous_response_not_found"


class RequestRefused(BadRequest):
    openai_code = "request_refused"


class StructureFailed(BadRequest):
    """Replaces a SequenceFailed that the request itself caused. The messages of both begin with `opening`."""

    openai_code = "structure_failed"
    opening: ClassVar[str] = "The output cannot be held to its structure"


class NothingAllowed(BadRequest):
    """Replaces a SequenceFailed whose request itself bans every token. The messages of both begin with `opening`."""

    openai_code = "nothing_allowed"
    opening: ClassVar[str] = "Every token is banned"


class Unsupported(BadRequest):
    openai_code = "unsupported"


class NotAuthorized(OstroError):
    http_status = 401
    openai_type = "invalid_request_error"
    openai_code = "invalid_api_key"


class NotAllowed(OstroError):
    http_status = 403
    openai_type = "invalid_request_error"
    openai_code = "not_allowed"


class UnknownResponse(OstroError):
    http_status = 404
    openai_type = "invalid_request_error"
    openai_code = "response_not_found"


class ModelNotFound(OstroError):
    http_status = 503
    openai_code = "model_error"

    def __init__(self, message: str, *, param: str | None = "model") -> None:
        super().__init__(message, param=param)

    @property
    def public(self) -> str:
        return without_places(self.message)


class UnknownModel(ModelNotFound):
    http_status = 404
    openai_type = "invalid_request_error"
    openai_code = "model_not_found"

    @property
    def public(self) -> str:
        return self.message


class BodyTimeout(OstroError):
    http_status = 408
    openai_type = "invalid_request_error"
    openai_code = "body_timeout"


class BodyTooLarge(OstroError):
    http_status = 413
    openai_type = "invalid_request_error"
    openai_code = "body_too_large"


class WrongContentType(OstroError):
    http_status = 415
    openai_type = "invalid_request_error"
    openai_code = "wrong_content_type"


class ModelError(OstroError):
    openai_code = "model_error"

    @property
    def public(self) -> str:
        return without_places(self.message)


class BadCheckpoint(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class TryLater(OstroError):
    """Worth retrying after `retry_after` seconds."""

    http_status = 503
    openai_code = "try_later"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(TryLater):
    http_status = 429
    openai_type = "rate_limit_error"
    openai_code = "queue_full"


class TooManyAttempts(TryLater):
    http_status = 429
    openai_type = "rate_limit_error"
    openai_code = "too_many_attempts"


class Unavailable(TryLater):
    openai_code = "unavailable"


class RequestTimeout(OstroError):
    http_status = 504
    openai_code = "timeout"


class DownloadFailed(OstroError):
    http_status = 502
    openai_code = "download_failed"
    general = "The model's source cannot be read. Try again later; the server's log says why."


class DiskFull(OstroError):
    http_status = 507
    openai_code = "disk_full"
    general = "The server has no room to store the model's files. Its log says more."


class SequenceFailed(OstroError):
    openai_code = "sequence_failed"

    @staticmethod
    def of_choice(message: str | None) -> OstroError:
        """The error to raise for a choice, from the engine's message: only an error's text crosses processes."""
        for kind in (StructureFailed, NothingAllowed):
            if message is not None and message.startswith(kind.opening):
                return kind(message)
        return SequenceFailed(message or "The engine gave up on this request. Try again.")


class ProfileFailed(OstroError):
    openai_code = "profile_failed"


class ServerError(OstroError):
    """Raised by clients. `status` is the response's status, if there was one."""

    http_status = 502
    openai_code = "server_error"

    def __init__(self, message: str, *, param: str | None = None, status: int | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status


class Unreachable(ServerError):
    openai_code = "unreachable"


class BadAnswer(ServerError):
    openai_code = "bad_answer"


def internal_error() -> OstroError:
    """What clients are told about a bug of ours: the details are for the log."""
    return OstroError("Internal server error. The server's log says more, under this response's x-request-id.")


def from_process(
    name: str, message: str, *, param: str | None = None, otherwise: type[OstroError] = ModelError
) -> OstroError:
    """Rebuilds an error of another process from the name of its class, its message and `param`.

    Where a message does not suffice to make one, uses the nearest base class for which it does. An unknown class
    becomes `otherwise`.
    """
    known = globals().get(name)
    kind = known if isinstance(known, type) and issubclass(known, OstroError) else otherwise
    error = _made(kind, message)
    error.param = param if param is not None else error.param
    return error


def _made(kind: type[OstroError], message: str) -> OstroError:
    try:
        return kind(message)
    except TypeError:
        return _made(next(base for base in kind.__bases__ if issubclass(base, OstroError)), message)
