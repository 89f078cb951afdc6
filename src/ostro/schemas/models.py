"""GET /v1/models and the server's word on itself."""

from typing import Literal

from ostro.schemas.wire import WireModel


class ModelCard(WireModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    permission: list[str]
    """Always empty: any client that may list a model may use it."""
    root: str
    parent: str | None
    max_model_len: int | None
    """Longest sequence, prompt and output together; null before the model is loaded."""
    backend: str | None
    """What computes it, such as `native (neon)` or `torch (cuda)`; null before it is loaded, as is the next."""
    precision: str | None
    """What weights, keys and values are kept in."""
    sampling_defaults: dict[str, int | float] | None
    """What holds where a chat request is silent, of `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and
    `max_tokens`: the server's settings, then the model's own. Null before the model is loaded."""
    state: Literal["available", "fetching", "loading", "ready", "draining", "failed"]
    """An available model is loaded when it is first asked for."""


class ModelList(WireModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Alive(WireModel):
    status: Literal["ok", "loading", "failed", "draining"]
    """Always ok, unless the server was told that /healthz waits for the model."""


class Readiness(WireModel):
    status: Literal["ready", "loading", "failed", "draining"]


class Health(WireModel):
    """Nothing of the model: it is told to anybody."""

    status: Literal["ok", "loading", "failed", "draining"]
    requests: int
    """Under way in the engines."""
    restarts: int
    """How often an engine had to be started again."""
    device: str | None
    """What the loaded models run on, cpu or cuda; null before one is."""
    backend: str | None
    """What computes them, such as "native (neon)" or "torch (cuda)"; several are separated by commas."""
    gpu: bool
    """Whether a GPU is used."""


class ModelStats(WireModel):
    """One model, for the server's operators."""

    id: str
    state: Literal["available", "fetching", "loading", "ready", "draining", "failed"]
    pinned: bool
    parent: str | None
    """Of an adapter: the model that it sits on."""
    bytes: int | None
    """Memory of its engine on the host, measured; null before it was first loaded."""
    device_bytes: int | None
    requests: int
    """That have the model now."""
    waiting: int
    """For it to be loaded."""
    requests_total: int
    """That its engines were given since the server started, and have ended. So are the next three."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in the cache."""
    generated_tokens: int
    loads: int
    evictions: int
    load_seconds: float | None
    """Of the last load."""
    idle_seconds: float | None
    """Since it was last used."""
    pages: int | None
    pages_free: int | None
    restarts: int
    """Of its engines, or its base's, since the server started."""
    failure: str | None


class Stats(WireModel):
    """GET /admin/stats."""

    models: list[ModelStats]
    loads: int
    evictions: int
    requests: int
    """Inside the gate."""
    waiting: int
    """In line for an engine."""
    memory_budget: int | None
    device_memory_budget: int | None
    max_models: int | None


class Version(WireModel):
    version: str
