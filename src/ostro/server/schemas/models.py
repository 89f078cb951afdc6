"""GET /v1/models and the server's word on itself."""

from typing import Literal

from ostro.server.schemas.wire import WireModel


class ModelCard(WireModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    permission: list[str]
    """Always empty: whoever may list a model may use it."""
    root: str
    parent: str | None
    max_model_len: int | None
    """Longest sequence, prompt and output together; null while the model loads."""


class ModelList(WireModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Alive(WireModel):
    status: Literal["ok"] = "ok"


class Readiness(WireModel):
    status: Literal["ready", "loading", "failed", "stopped", "draining"]


class Health(WireModel):
    """Nothing of the model: it is told to anybody."""

    status: Literal["ok", "loading", "failed", "stopped", "draining"]
    requests: int
    """Under way in the engine."""
    restarts: int
    """How often the engine had to be started again."""


class Version(WireModel):
    version: str
