#!/bin/sh
# Installs Ostro into a virtual environment of this checkout, if it is not there yet, and serves: arguments are those of
# `ostro serve`, and so are the OSTRO_…, AIOS_… and other variables that docs/configuration.md lists.
#
#   scripts/run_server.sh --port 9000 ./my-model
#   AIOS_MODEL_PATH=./brain AIOS_DEVICE=cpu scripts/run_server.sh
#
# What the arguments, variables and `.env` ask for beyond the package itself is installed too: a bucket's client for
# GCS_BUCKET, gs://… and s3://…, TensorStore for a checkpoint of Levanter's, OpenTelemetry for a collector of traces,
# torch for a GPU and for what AIOS_MODEL_PATH names, which may be an HRM.
#
# OSTRO_VENV    where the virtual environment is (default: .venv of the checkout)
# PYTHON        the Python that makes it, 3.11 or later (default: python3)
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=${OSTRO_VENV:-$root/.venv}
# The server takes OSTRO_… for its settings and says so when it knows none of that name.
unset OSTRO_VENV

# Every setting that was given, a line each: arguments, variables, the .env file, and a config file.
given() {
    env
    [ ! -f .env ] || cat .env
    config=${OSTRO_CONFIG:-}
    for word in "$@"; do
        case "${before:-}" in --config | --config-path) config=$word ;; esac
        case "$word" in --config=* | --config-path=*) config=${word#*=} ;; esac
        before=$word
        printf '%s\n' "$word"
    done
    [ ! -f "$config" ] || cat "$config"
}

settings=$(given "$@" | grep -v '^[[:space:]]*#' || true)
extras=
while IFS='|' read -r extra pattern; do
    if printf '%s\n' "$settings" | grep -Eq -e "$pattern"; then extras=${extras:+$extras,}$extra; fi
done <<'END'
gcs|^(export +)?(OSTRO_)?GCS_BUCKET=.|^--gcs-bucket|^gcs[_-]bucket:|gs://
jax|^(export +)?OSTRO_(CPU_)?BACKEND=jax|^--(cpu-)?backend=jax|^jax$|^backend: *jax
jax|^(export +)?OSTRO_DEVICE=tpu|^--device=tpu|^tpu$|^device: *tpu
levanter|^(export +)?OSTRO_CHECKPOINT_PATH=.|^--checkpoint-path|^checkpoint[_-]path:
otel|^(export +)?OSTRO_OTLP_ENDPOINT=.|^--otlp-|^otlp[_-]
s3|s3://
torch|^(export +)?(AIOS|OSTRO)_DEVICE=cuda|^--device=cuda|^cuda$|^device: *cuda|^(export +)?AIOS_MODEL_PATH=.|^--model-path
torch|^(export +)?OSTRO_(CPU_)?BACKEND=torch|^--(cpu-)?backend=torch|^torch$|^(cpu[_-])?backend: *torch
END

python=${PYTHON:-python3}
if [ -x "$venv/bin/python" ]; then
    python=$venv/bin/python
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "run_server.sh: $python is not Python 3.11 or later. Install one and name it: PYTHON=python3.12 $0" >&2
    exit 1
fi
# Returns at once where everything is installed. Standard output is the server's.
"$python" "$root/scripts/install.py" --venv "$venv" --extras "$extras" >&2

# `exec`: signals reach the server itself.
exec "$venv/bin/ostro" serve "$@"
