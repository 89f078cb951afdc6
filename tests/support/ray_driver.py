"""A program: a Ray cluster on this machine with Ostro on it, until its standard input ends. For tests and benchmarks,
which must not have Ray's threads and warnings in their own process.

    python ray_driver.py PORT CPUS        then one JSON object a line: {"do": "deploy", "args": {…}}

Each command is answered by one line of JSON on standard output; all that Ray has to say goes to standard error.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import cache

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from ostro.ray.application import ENGINE, build
from ostro.ray.replica import Facts

APP = "default"


def deploy(args: dict[str, object]) -> object:
    """Replaces what is there, and returns once it is ready."""
    serve.run(build(args), name=APP, route_prefix="/")
    return {}


def remove() -> object:
    serve.delete(APP)
    return {}


@cache
def engines() -> DeploymentHandle:
    """One for all commands: each handle has a router of its own, which hears of every change."""
    return serve.get_deployment_handle(ENGINE, APP)


def facts() -> object:
    """Facts about each replica that answers; empty while there is none."""
    try:
        asked = engines().broadcast("facts")
        answers = asked.results(timeout_s=30, return_exceptions=True)
        return [asdict(each) for each in answers if isinstance(each, Facts)]
    except DeploymentUnavailableError:
        return []


def status() -> object:
    deployment = serve.status().applications[APP].deployments[ENGINE]
    return {"status": deployment.status.value, "replicas": dict(deployment.replica_states)}


COMMANDS: dict[str, Callable[..., object]] = {"deploy": deploy, "remove": remove, "facts": facts, "status": status}


def main() -> None:
    port, cpus = map(int, sys.argv[1:])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    directory = tempfile.mkdtemp(prefix="ostro-ray-", dir="/tmp")
    try:
        ray.init(
            num_cpus=cpus,
            include_dashboard=False,
            namespace="serve",
            object_store_memory=100 << 20,
            logging_level=logging.WARNING,
            _temp_dir=directory,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        print(json.dumps({"pid": os.getpid()}), file=replies)
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = COMMANDS[command.pop("do")](**command)
                print(json.dumps({"answer": answer}), file=replies)
            except Exception as error:  # noqa: BLE001  told to whoever asked
                print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies)
        serve.shutdown()
    finally:
        ray.shutdown()
        replies.close()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
