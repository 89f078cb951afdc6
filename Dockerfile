# Four images: `cpu`, the default, without torch; `cuda`; `tpu`, with JAX; and `hrm-serve`, by the name that AI-OS's
# scripts build: the `cuda` image, but its torch may be one for CPUs. docs/deployment.md says how they are built and run.
#
#   build-tpu <── build ──> build-torch ──> build-cuda, build-hrm: Triton's helper, compiled ahead   compilers stay behind
#     │             │                           │           │
#    tpu           cpu                        cuda      hrm-serve             on `runtime`: Python, one user, no compiler
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ENV PATH=/opt/venv/bin:$PATH \
    PIP_CACHE_DIR=/var/cache/pip \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# Not pinned: Debian keeps one version of each, and nothing of it reaches an image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv

# What changes seldom comes first: the dependencies are a layer of their own.
ARG EXTRAS=gcs,levanter,otel,s3
COPY pyproject.toml constraints.txt ./
COPY deploy/docker/requirements.py deploy/docker/
RUN python deploy/docker/requirements.py --extras "$EXTRAS" > requirements.txt
# The cache is a mount, of which nothing stays in a layer.
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip pip install -c constraints.txt -r requirements.txt

COPY README.md LICENSE ./
COPY native native
COPY src src
# Without the native core pip would succeed; an image does not.
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    pip install --no-deps . \
    && ls /opt/venv/lib/python3*/site-packages/ostro/kernels/cpu/libostro_native.so
# Settings of the images are a file, not variables: a variable would win over a user's .env file.
COPY deploy/docker/defaults.yaml /opt/venv/etc/ostro.yaml
COPY deploy/docker/healthcheck.py /opt/venv/bin/healthcheck.py
# Tells errors to name another image rather than a package to install.
RUN touch /opt/venv/etc/ostro-image

FROM build AS build-torch
# An index of torch builds, as PyTorch has one for CPUs; without it torch comes from where the rest does.
ARG TORCH_INDEX_URL=""
RUN python deploy/docker/requirements.py --extras torch > requirements.txt
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    if [ -n "$TORCH_INDEX_URL" ]; then pip install --index-url "$TORCH_INDEX_URL" -c constraints.txt torch; fi \
    && pip install -c constraints.txt -r requirements.txt

FROM build-torch AS build-cuda
COPY deploy/docker/prebuilt_cc.py deploy/docker/prebuild_triton.py deploy/docker/
RUN python deploy/docker/prebuild_triton.py /opt/triton

FROM build-torch AS build-hrm
COPY deploy/docker/prebuilt_cc.py deploy/docker/prebuild_triton.py deploy/docker/
RUN python deploy/docker/prebuild_triton.py --or-none /opt/triton

FROM build AS build-tpu
RUN python deploy/docker/requirements.py --extras jax > requirements.txt
# Which libtpu goes with it, JAX says.
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip pip install -c constraints.txt -r requirements.txt "jax[tpu]"

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS runtime
ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="Ostro" \
      org.opencontainers.image.description="An inference server for language models, behind the OpenAI API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# The cache belongs to group 0 too: some clusters run containers under any uid, in that group.
RUN groupadd --gid 10001 ostro \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin ostro \
    && install -d -o 10001 -g 0 -m 0775 /cache
# All that is written goes to /cache and /tmp, so that the root file system may be read-only.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface
WORKDIR /srv
VOLUME ["/cache"]
EXPOSE 8000 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "/opt/venv/bin/healthcheck.py", "/healthz"]
ENTRYPOINT ["ostro"]
CMD ["serve"]

FROM runtime AS runtime-nvidia
# /usr/local/nvidia is where GKE mounts the driver; NVIDIA's container toolkit needs no path.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=$PATH:/usr/local/nvidia/bin \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    TRITON_CACHE_DIR=/cache/triton \
    CC=/opt/triton/cc

FROM runtime-nvidia AS cuda
COPY --from=build-cuda /opt/triton /opt/triton
COPY --from=build-cuda /opt/venv /opt/venv
USER 10001:10001

FROM runtime AS tpu
COPY --from=build-tpu /opt/venv /opt/venv
USER 10001:10001

FROM runtime-nvidia AS hrm-serve
COPY --from=build-hrm /opt/triton /opt/triton
COPY --from=build-hrm /opt/venv /opt/venv
USER 10001:10001

FROM runtime AS cpu
COPY --from=build /opt/venv /opt/venv
USER 10001:10001
