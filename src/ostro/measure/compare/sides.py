"""The interface of a compared side, and the parsing of references such as `tgi+http://host:8080`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ostro.client.target import check_address, check_key
from ostro.errors import BadRequest
from ostro.measure.compare.answers import Outcome, Prompt
from ostro.measure.compare.dialects import TGI, Native, OpenAI
from ostro.measure.compare.http_side import HttpSide, Server
from ostro.measure.compare.offline import Offline
from ostro.sampling_params import SamplingParams


class Side(Protocol):
    @property
    def reference(self) -> str:
        """The reference as given by the user."""

    @property
    def model(self) -> str:
        """The model's name, known once `prepare` has run."""

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Raises BadRequest for anything this side cannot express. Uses no network."""

    def prepare(self) -> None:
        """Finds the model; raises OstroError if that fails."""

    def open(self) -> None:
        """Gets ready to answer; loads a local model. `close` undoes it."""

    def answers(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, concurrency: int
    ) -> Iterator[tuple[int, Outcome]]:
        """Runs up to `concurrency` prompts at a time; yields indexes and outcomes in order of completion."""

    def close(self) -> None:
        """Releases resources, such as a model's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideOptions:
    """A side's settings besides its reference."""

    key: str | None = field(default=None, repr=False)
    model: str | None = None
    timeout: float = 600.0


_SCHEME = re.compile(r"(?:(\w+)\+)?https?://", re.IGNORECASE)


def side_of(reference: str, options: SideOptions) -> Side:
    """Raises BadRequest for an invalid reference."""
    match = _SCHEME.match(reference)
    if match is None and "://" in reference and not reference.startswith(("offline:", "gs://", "s3://")):
        raise BadRequest(
            f"{reference!r} is not a valid side. Give http://…, tgi+http://…, ostro+http://… or offline:MODEL."
        )
    return _offline(reference, options) if match is None else _over_http(reference, match[1], options)


def _over_http(reference: str, dialect: str | None, options: SideOptions) -> Side:
    url = reference[len(dialect) + 1 :] if dialect else reference
    server = Server(check_address(url), key=check_key(options.key or ""), timeout=options.timeout)
    match (dialect or "openai").lower():
        case "openai":
            return HttpSide(reference, OpenAI(server, options.model))
        case "tgi":
            return HttpSide(reference, TGI(server, options.model))
        case "ostro":
            return HttpSide(reference, Native(server, options.model))
        case unknown:
            raise BadRequest(f"{unknown}+http is not a known dialect. Use openai (plain http), tgi or ostro.")


def _offline(reference: str, options: SideOptions) -> Side:
    if options.key is not None or options.model is not None:
        raise BadRequest(f"{reference!r} is a model in this process: it takes no key and no other model's name.")
    return Offline.of(reference)
