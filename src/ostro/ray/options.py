"""Settings that only a cluster has: replicas, their resources, autoscaling. Starts nothing. Read from OSTRO_RAY_…
environment variables, or from NAME=VALUE after `serve run deploy.ray:build`.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ostro.config import EngineConfig
from ostro.devices import runs_on_jax
from ostro.errors import BadRequest
from ostro.server.settings import RAY_PREFIX, REFUSED, Given, Merged, ServeSettings, check_variables, read_settings

Routing = Literal["prefix", "power_of_two", "round_robin"]
Count = Annotated[int, Field(ge=1)]
# Ray's own variables: whether there is an HAProxy; whether a replica's HTTP server shares the application's event loop,
# so that it can apply backpressure when a client reads slowly; whether the process that chooses replicas sees the body.
_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_SEPARATE_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
_FORWARD_BODY = "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY"
_ROUTERS = "RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE"
_HARD_STOP, _HARD_STOP_SECONDS = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", 120.0
_SCALING = frozenset({"target_requests", "upscale_delay", "downscale_delay", "look_back"})


class RayOptions(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=RAY_PREFIX, frozen=True, extra="forbid")

    config: Path | None = Field(None, description="a YAML file of the server's settings, as for `ostro serve --config`")
    replicas: Count = Field(1, description="engine replicas; with max_replicas, the minimum")
    max_replicas: Count | None = Field(None, description="maximum number of replicas, for autoscaling by load")
    target_requests: Annotated[float, Field(gt=0)] | None = Field(
        None, description="requests per replica, waiting and running, above which to scale up (default: half a batch)"
    )
    upscale_delay: Annotated[float, Field(ge=0)] = Field(10.0, description="seconds of high load before scaling up")
    downscale_delay: Annotated[float, Field(ge=0)] = Field(300.0, description="seconds of low load before scaling down")
    look_back: Annotated[float, Field(gt=0)] = Field(15.0, description="seconds over which requests are averaged")
    ingress_replicas: Count = Field(1, description="processes in front of the engines; each learns prefixes by itself")
    cpus: Annotated[float, Field(ge=0)] = Field(1.0, description="CPUs per replica, and its threads")
    gpus: Annotated[float, Field(ge=0)] | None = Field(
        None, description="GPUs per replica (default: tensor_parallel with device=cuda, else 0)"
    )
    routing: Routing = Field("prefix", description="how a replica is chosen")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError("max_replicas must not be lower than replicas")
        if self.max_replicas is None and (idle := _SCALING & self.model_fields_set):
            raise ValueError(f"max_replicas is not set, and without it {', '.join(sorted(idle))} would do nothing")
        return self


def read_options(args: Mapping[str, object]) -> tuple[RayOptions, Merged]:
    """The cluster's and the server's settings, from arguments and the environment."""
    known = [*RayOptions.model_fields, *ServeSettings.model_fields]
    for name in args:
        if name in REFUSED:
            raise BadRequest(f"{name} is not supported: {REFUSED[name]}", param=name)
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            cure = f"Did you mean {close[0]}?" if close else "docs/ray.md and docs/configuration.md list them all."
            raise BadRequest(f"{name} is not a setting. {cure}", param=name)
    check_variables(os.environ, RAY_PREFIX, {RAY_PREFIX + name.upper() for name in RayOptions.model_fields})
    own = {name: value for name, value in args.items() if name in RayOptions.model_fields}
    try:
        options = RayOptions(**own)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "max_replicas"
        complaint = str(first["msg"]).removeprefix("Value error, ")
        raise BadRequest(f"{name} ({RAY_PREFIX}{name.upper()}): {complaint}.", param=name) from None
    given = {name: Given(value, name) for name, value in args.items() if name not in own}
    return options, read_settings(given, config=options.config)


def goes_direct(options: RayOptions, environment: Mapping[str, str]) -> bool:
    """Whether Serve's ingress is HAProxy, which can send requests straight to replicas.

    Raises BadRequest if its setup would make it do that badly.
    """
    if environment.get(_HAPROXY) != "1":
        return False
    needed = {_SEPARATE_THREAD: "0"} | ({_FORWARD_BODY: "1"} if options.routing == "prefix" else {})
    missing = [f"{name}={value}" for name, value in needed.items() if environment.get(name) != value]
    if missing:
        raise BadRequest(f"With {_HAPROXY}=1, set {' and '.join(missing)} as well, for the whole cluster.")
    if "ingress_replicas" in options.model_fields_set:
        raise BadRequest(
            "ingress_replicas would do nothing: with HAProxy there is no ingress. How many processes choose replicas "
            f"on each node with a proxy is set by {_ROUTERS}.",
            param="ingress_replicas",
        )
    return True


def hard_stop_seconds(environment: Mapping[str, str]) -> float:
    """How long an HAProxy that has been replaced may go on with its streams."""
    told = environment.get(_HARD_STOP, "")
    return float(told) if told.isdecimal() else _HARD_STOP_SECONDS


def threads_of(options: RayOptions, settings: ServeSettings) -> int | None:
    """The engine's threads, unless the settings name a number; None with JAX, which cannot be told."""
    return None if runs_on_jax(settings.engine()) else max(1, int(options.cpus))


def devices_of(options: RayOptions, settings: ServeSettings) -> dict[str, object]:
    """Ray's options for the devices of a replica: all that its model is divided over, on one node.

    Raises BadRequest if `gpus` is fewer than that, or if nothing says how many devices to reserve.
    """
    engine = settings.engine()
    needed = engine.tensor_parallel
    if needed == "auto":
        needed = _all_devices(options, engine)
    # Ray counts the chips of a TPU host under this name.
    tpus = {"TPU": float(needed)} if engine.device == "tpu" else {}
    gpus = options.gpus if options.gpus is not None else float(needed if engine.device == "cuda" else 0)
    if engine.device == "cuda" and needed > 1 and gpus < needed:
        raise BadRequest(
            f"gpus is {gpus:g}, but a model that is divided over {needed} GPUs needs as many. Leave gpus out.",
            param="gpus",
        )
    return {"num_gpus": gpus, "resources": tpus}


def _all_devices(options: RayOptions, engine: EngineConfig) -> int:
    """The number of devices that "auto" means for a replica, which sees only those it has reserved."""
    if engine.device == "cuda" and options.gpus is not None:
        return max(1, int(options.gpus))
    if engine.device in ("cuda", "tpu"):
        raise BadRequest(
            "tensor_parallel is auto, but Ray reserves a replica's devices before it starts. Set it to their number, "
            "as in tensor_parallel=4.",
            param="tensor_parallel",
        )
    return 1


def explicit(merged: Merged) -> dict[str, Given]:
    """Only explicitly given settings. Other values depend on a replica's machine and are determined there."""
    return {
        name: Given(getattr(merged.settings, name), origin)
        for name, origin in merged.origins.items()
        if not origin.startswith("implied by")
    }
