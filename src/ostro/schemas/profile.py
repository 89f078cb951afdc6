"""POST /admin/profile."""

from typing import Annotated

from pydantic import Field

from ostro.schemas.wire import RequestModel, WireModel


class ProfileRequest(RequestModel):
    """What to profile, and for how long: the time or the number of steps, whichever ends first."""

    model: str = "default"
    seconds: Annotated[float, Field(gt=0, le=60)] = 5.0
    max_steps: Annotated[int, Field(ge=1, le=10_000)] = 1000


class ProfileResponse(WireModel):
    model: str
    path: str
    """The trace, on the server: Chrome trace JSON, gzipped. Open it at ui.perfetto.dev."""
    steps: int
    """Engine steps that it covers; 0 if there was nothing to do."""
    seconds: float
    """Duration of the profile, until the trace was written."""
