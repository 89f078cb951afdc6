"""What child processes and logs may hold: no secret that is not theirs, and no more than there is room for."""

import json
from pathlib import Path

from live_server import live_server

from ostro.processes.environment import download_environment, engine_environment

OURS = {"OSTRO_API_KEY": "sk-ours", "OSTRO_ADMIN_KEY": "sk-boss", "OSTRO_PRIORITY_KEY": "sk-fast", "DB_PASSWORD": "x"}
STORES = {"HF_TOKEN": "hf", "AWS_SECRET_ACCESS_KEY": "aws", "GOOGLE_APPLICATION_CREDENTIALS": "/key.json"}
NEEDED = {"PATH": "/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "2", "OSTRO_CACHE": "/c"}


def test_engine_process_has_no_keys_in_its_environment(tmp_path: Path) -> None:
    with live_server(tmp_path, env={**OURS, **STORES}, cold=True) as server:
        pid = server.process.pid
        # An idle server starts another process, which checks grammars.
        engine, *_ = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        held = Path(f"/proc/{engine}/environ").read_bytes().split(b"\0")
        names = {each.partition(b"=")[0].decode() for each in held}
    assert not names & {*OURS, *STORES}
    assert {"PATH", "OSTRO_FAULTS"} <= names


def test_downloads_get_the_credentials_of_stores_and_engines_get_none() -> None:
    environ = {**OURS, **STORES, **NEEDED, "LEVANTER_API_KEY": "sk", "OTEL_EXPORTER_OTLP_HEADERS": "key=1"}
    assert engine_environment(environ) == NEEDED
    assert download_environment(environ) == {**STORES, **NEEDED}


def test_log_line_of_a_long_path_is_short(tmp_path: Path) -> None:
    with live_server(tmp_path) as server, server.client() as client:
        assert client.get("/" + "x" * 50_000).status_code == 404
    lines = [line for line in server.log_text.splitlines() if "xxxx" in line]
    assert lines
    assert all(len(line) < 6_000 for line in lines)
    assert all("characters]" in json.loads(line)["path"] for line in lines)
