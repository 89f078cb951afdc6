"""litellm against `ostro serve`, as an OpenAI-compatible provider. In a process of its own: its imports warn."""

import json
import subprocess
import sys
from pathlib import Path

from live_server import live_server

PROGRAM = """
import json, sys
import litellm

given = dict(
    model="openai/default", api_base=sys.argv[1], api_key="none", num_retries=0, max_tokens=12, temperature=0,
    messages=[{"role": "user", "content": "Say hello."}],
)
whole = litellm.completion(**given)
chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
rebuilt = litellm.stream_chunk_builder(chunks)
seen = {
    "whole": whole.choices[0].message.content,
    "streamed": text,
    "finish_reason": rebuilt.choices[0].finish_reason,
    "usage": rebuilt.usage.completion_tokens,
}
try:
    litellm.completion(**{**given, "messages": [{"role": "user", "content": "x " * 20000}]})
except litellm.ContextWindowExceededError as error:
    seen["error"] = error.status_code
print(json.dumps(seen))
"""


def test_litellm_completes_streams_and_knows_a_context_error(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, f"{server.url}/v1"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=tmp_path,
        )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert seen["whole"]
    assert seen["whole"] == seen["streamed"]
    assert (seen["finish_reason"], seen["usage"], seen["error"]) == ("length", 12, 400)
