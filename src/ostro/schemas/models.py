"""GET /v1/models, health and statistics; POST /admin/profile."""

from typing import Annotated, Literal

from pydantic import Field

from ostro.schemas.wire import RequestModel, WireModel


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
    """Maximum sequence length, prompt plus output; null before the model is loaded."""
    backend: str | None
    """What runs it, such as `native (neon)` or `torch (cuda)`; null before it is loaded, like the next field."""
    precision: str | None
    """The precision of weights and KV cache."""
    sampling_defaults: dict[str, int | float] | None
    """Defaults for chat requests of `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and
    `max_tokens`: the server's settings, then the model's own. Before the model is loaded, they are null in a list;
    asked for alone, a model shows them if its files are on this machine."""
    state: Literal["available", "fetching", "loading", "ready", "draining", "failed"]
    """An available model is loaded on its first request."""


class ModelList(WireModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Alive(WireModel):
    status: Literal["ok", "loading", "failed", "draining"]
    """Always ok, unless healthz_waits_for_model is set."""


class Readiness(WireModel):
    status: Literal["ready", "loading", "failed", "draining"]


class Health(WireModel):
    """Reveals nothing about the models: it is public."""

    status: Literal["ok", "loading", "failed", "draining"]
    requests: int
    """Requests in flight in the engines."""
    restarts: int
    """How often an engine was restarted."""
    device: str | None
    """What the loaded models run on, cpu, cuda, tpu or mps; null before one is loaded."""
    devices: int | None
    """How many devices the model that is divided over most of them uses; null before one is loaded."""
    backend: str | None
    """What runs them, such as "native (neon)" or "torch (cuda)"; several are separated by commas."""
    gpu: bool
    """Whether a GPU is used."""


class ModelStats(WireModel):
    """One model, for the server's operators."""

    id: str
    state: Literal["available", "fetching", "loading", "ready", "draining", "failed"]
    pinned: bool
    parent: str | None
    """For an adapter: its base model."""
    bytes: int | None
    """Measured host memory of its engine; null before it was first loaded."""
    device_bytes: int | None
    requests: int
    """Requests that are using the model now."""
    waiting: int
    """Requests waiting for it to be loaded."""
    requests_total: int
    """Finished requests of its engines since the server started. The next three cover the same period."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    generated_tokens: int
    loads: int
    evictions: int
    load_seconds: float | None
    """Duration of the last load."""
    fetched_bytes: int | None
    """While it is downloaded: how much of it is here, and below how much there is. Null if the source does not say."""
    fetch_bytes: int | None
    idle_seconds: float | None
    """Seconds since it was last used."""
    pages: int | None
    pages_free: int | None
    restarts: int
    """Restarts of its engines, or its base's, since the server started."""
    failure: str | None


class Stats(WireModel):
    """GET /admin/stats."""

    models: list[ModelStats]
    loads: int
    evictions: int
    requests: int
    """Admitted requests that have not finished."""
    waiting: int
    """Requests queued for an engine."""
    memory_budget: int | None
    device_memory_budget: int | None
    max_models: int | None


class ShortName(WireModel):
    """A model that `ostro serve` and `ostro models pull` know by a name of their own."""

    name: str
    description: str
    licence: str
    sources: str
    bytes: int
    """Approximate size of its files."""
    here: bool
    """Whether it is on this machine."""


class CachedModel(WireModel):
    """A model in Ostro's cache, without those in the Hub's own."""

    name: str
    source: str
    bytes: int
    last_use: float | None
    """Seconds since the epoch."""
    in_use: bool


class Known(WireModel):
    """GET /admin/available."""

    short_names: list[ShortName]
    cached: list[CachedModel]


class PlanFigures(WireModel):
    """What `ostro plan` says, with all memory that unloading other models would free. Sizes are in bytes, on several
    devices those of each.
    """

    fits: bool
    device: str
    backend: str
    precision: str
    parameters: int
    memory: int
    """Memory that there is."""
    total_bytes: int
    """Memory that the model needs: weights, KV cache and work space."""
    weights_bytes: int
    kv_bytes: int
    max_seq_len: int
    """Longest sequence that can run."""


class ModelOutlook(WireModel):
    """GET /admin/plan/{model}: a model that is not loaded yet."""

    id: str
    kind: Literal["path", "bucket", "hub", "wheels", "short name"]
    source: str
    here: bool
    """Whether its files are on this machine."""
    bytes: int | None
    """Size of its files; null if that is not known before they are downloaded."""
    plan: PlanFigures | None
    unknown: str | None
    """Why there is no plan."""


class Version(WireModel):
    version: str


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
