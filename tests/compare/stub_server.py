"""A small real HTTP server on loopback that answers as a test says, and remembers what it was asked."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    path: str
    body: Any
    key: str | None


@dataclass(frozen=True)
class Reply:
    """JSON, or, where `events` is given, a stream of them."""

    json: object = None
    events: Iterable[bytes] | None = None
    status: int = 200
    cut: bool = False
    """Whether the connection breaks at the end, before HTTP's end of the body."""


@dataclass
class Stub:
    url: str = ""
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def stub_server(answer: Callable[[Asked], Reply]) -> Iterator[Stub]:
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, body: object) -> None:
            asked = Asked(self.path, body, self.headers["Authorization"])
            stub.asked.append(asked)
            reply = answer(asked)
            self.send_response(reply.status)
            if reply.events is None:
                self._send_json(reply.json)
            else:
                self._send_events(reply)

        def _send_json(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _send_events(self, reply: Reply) -> None:
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in reply.events or ():
                self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            if reply.cut:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    try:
        yield stub
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def tgi(words: Iterable[tuple[int, str]], *, stops: str = "length") -> Callable[[Asked], Reply]:
    """Text Generation Inference as its documentation has it: /info, and /generate_stream with events in its form.

    It refuses what the real one refuses: a temperature or a top_p at its end, seeds below 1.
    """
    tokens = list(words)

    def answer(asked: Asked) -> Reply:
        if asked.path == "/info":
            return Reply({"model_id": "org/tiny", "version": "3.3.4", "max_input_tokens": 1024})
        if asked.path != "/generate_stream":
            return Reply({"error": "not here"}, status=404)
        if (wrong := _refused_by_tgi(asked.body["parameters"])) is not None:
            return Reply({"error": f"Input validation error: {wrong}", "error_type": "validation"}, status=422)
        return Reply(events=_tgi_events(asked.body["parameters"]))

    def _tgi_events(parameters: Mapping[str, Any]) -> Iterator[bytes]:
        chosen = tokens[: parameters["max_new_tokens"]]
        whole = "".join(text for _, text in chosen)
        for index, (id, text) in enumerate(chosen, 1):
            last = index == len(chosen)
            told = {
                "index": index,
                "token": {"id": id, "text": text, "logprob": -0.25 * index, "special": False},
                "generated_text": whole if last else None,
                "details": {"finish_reason": stops, "generated_tokens": len(chosen), "seed": None} if last else None,
            }
            yield b"data:" + json.dumps(told).encode() + b"\n\n"

    return answer


def _refused_by_tgi(parameters: Mapping[str, Any]) -> str | None:
    known = {"max_new_tokens", "do_sample", "details", "return_full_text", "temperature", "top_p", "seed", "stop"}
    if unknown := parameters.keys() - known:
        return f"unknown {unknown}"
    if parameters.get("temperature") is not None and parameters["temperature"] <= 0:
        return "`temperature` must be strictly positive"
    if parameters.get("top_p") is not None and not 0 < parameters["top_p"] < 1:
        return "`top_p` must be > 0.0 and < 1.0"
    return None if parameters.get("seed", 1) > 0 else "`seed` must be positive"
