"""Ray Serve's way in. Each name makes the application from the environment (OSTRO_…, OSTRO_RAY_…) and arguments:

    serve run deploy.ray:app
    serve run deploy.ray:build model=./model replicas=2

See docs/ray.md.
"""

from ostro.ray.application import build

__all__ = ["app", "build"]

app = build
