"""Whole runs, with real load processes, against servers whose behaviour is known."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec
import pytest
from scripted_server import CLOSE, END, STREAM, WAIT, Scripted, answer, chunk, delta, event, plain, scripted_server

from ostro.errors import ModelNotFound, ServerError, Unreachable
from ostro.measure.bench.figures import Slo, figures
from ostro.measure.bench.jobs import Go, Job, Level, Progress, RunJob, Stop
from ostro.measure.bench.load_workers import load_workers
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.run import Bench, BenchOptions, bench
from ostro.measure.bench.self_test import null_server, self_test
from ostro.measure.bench.workload import Item, Span, Workload

PROMPT = [Item(prompt="Hello")]


@contextmanager
def unwatched(level: Level) -> Iterator[Callable[[Progress], None]]:
    yield lambda progress: None


def closed(*values: int, requests: int = 4, warmup: int = 0) -> list[Level]:
    return [
        Level(kind="concurrency", value=value, number=number, requests=requests, warmup=warmup)
        for number, value in enumerate(values)
    ]


def run(
    url: str,
    levels: list[Level],
    *,
    workload: Workload | None = None,
    timeout: float = 60.0,
    processes: int = 1,
    slo: Slo | None = None,
    self_test: bool = False,
    **headers: str,
) -> Bench:
    options = BenchOptions(
        url=url,
        headers=headers,
        workload=workload or Workload(items=PROMPT, output_len=Span(4, 4)),
        levels=levels,
        timeout=timeout,
        processes=processes,
        slo=slo,
        self_test=self_test,
    )
    return bench(options, unwatched)


@contextmanager
def chat_server(reply: Callable[[Any], Iterable[bytes]]) -> Iterator[Scripted]:
    """Lists its models and answers chats by what the test says."""

    def script(path: str, body: Any) -> Iterable[bytes]:
        return [plain({"data": [{"id": "scripted"}]})] if path == "/v1/models" else reply(body)

    with scripted_server(script) as server:
        yield server


def proper(body: Any) -> list[bytes]:
    return answer(["word"] * body["max_tokens"])


@pytest.mark.full
def test_every_request_of_every_level_is_sent_and_reported() -> None:
    with null_server(ttft=0.01, itl=0.002) as url:
        found = run(url, closed(1, 3, requests=7, warmup=2))
    assert [level.level.value for level in found.levels] == [1, 3]
    for level in found.levels:
        assert [each.index for each in level.outcomes] == list(range(7))
        assert all(each.error is None for each in level.outcomes)
        assert all(len(each.arrivals) == each.output_tokens == 4 for each in level.outcomes)
        # By the server's own stamps: nothing is seen before it was written, nor written before it was asked for.
        for each in level.outcomes:
            assert 0 < each.received < each.stamps[0]
            assert all(seen > written for seen, written in zip(each.arrivals, each.stamps, strict=True))
        assert level.figures.output_tokens == 28
    assert found.options.workload.model == "null"
    assert found.whole


@pytest.mark.full
def test_figures_are_those_of_the_recorded_requests() -> None:
    slo = Slo.parsed("ttft=10s,e2e=20s")
    with null_server(ttft=0.005, itl=0.001) as url:
        found = run(url, closed(3, requests=9), slo=slo)
    told = json.loads(json.dumps(found.as_json()))["levels"][0]
    recorded = [
        Outcome(**{name: value for name, value in row.items() if name not in ("ttft", "itl", "tpot")})
        for row in told["requests"]
    ]
    again = figures(recorded, slo=slo)
    assert told["figures"]["ttft"]["p50"] == pytest.approx(again.ttft.p50 if again.ttft else None, abs=2e-6)
    assert told["figures"]["itl"]["p99"] == pytest.approx(again.itl.p99 if again.itl else None, abs=4e-6)
    assert told["figures"]["e2e"]["max"] == max(row["e2e"] for row in told["requests"])
    tokens = sum(row["output_tokens"] for row in told["requests"])
    assert told["figures"]["output_tokens_per_second"] == pytest.approx(tokens / told["figures"]["seconds"])
    assert told["figures"]["goodput"]["share"] == 1.0


@pytest.mark.full
def test_processes_share_the_work() -> None:
    """One that has no client gets no requests either: they would never be asked."""
    with chat_server(proper) as server:
        found = run(server.url, closed(5, 1, requests=11, warmup=3), processes=2)
    assert [len(level.burdens) for level in found.levels] == [2, 1]
    for level in found.levels:
        assert [each.index for each in level.outcomes] == list(range(11))


def test_closed_loop_keeps_the_given_number_under_way() -> None:
    """Nobody is answered before all clients have asked."""
    together = threading.Barrier(6)

    def reply(body: Any) -> list[bytes]:
        if body["max_tokens"] == 4:
            together.wait(30)
        return proper(body)

    with chat_server(reply) as server:
        found = run(server.url, closed(6, requests=12))
    assert found.levels[0].figures.succeeded == 12


@pytest.mark.full
def test_open_loop_does_not_wait_for_answers() -> None:
    """No request is answered before the last has come: a loop that waited would never get there."""
    together = threading.Barrier(8)

    def reply(body: Any) -> list[bytes]:
        if body["max_tokens"] == 4:
            together.wait(30)
        return proper(body)

    level = Level(kind="rate", value=200.0, number=0, requests=8)
    with chat_server(reply) as server:
        found = run(server.url, [level], processes=2)
    assert found.levels[0].figures.succeeded == 8
    assert all(each.late is not None and each.late >= 0 for each in found.levels[0].outcomes)


def test_trace_is_asked_in_order_at_no_time_before_its_own() -> None:
    items = [Item(prompt=f"prompt {number}", output_len=number + 1, at=number * 0.02) for number in range(6)]
    level = Level(kind="trace", value=2.0, number=0, requests=6)
    with chat_server(proper) as server:
        found = run(server.url, [level], workload=Workload(items=items, output_len=Span(1, 1)))
    outcomes = found.levels[0].outcomes
    assert [each.output_tokens for each in outcomes] == [1, 2, 3, 4, 5, 6]
    assert all(each.start >= number * 0.01 for number, each in enumerate(outcomes))
    # Connections of their own may overtake one another on a busy machine.
    assert sorted(body["messages"][0]["content"] for body in server.bodies if body)[-6:] == [
        item.prompt for item in items
    ]


@pytest.mark.full
def test_duration_ends_a_level_that_has_no_number_of_requests() -> None:
    level = Level(kind="concurrency", value=2, number=0, requests=None, duration=1.5)
    with null_server(ttft=0.001, itl=0.001) as url:
        found = run(url, [level])
    assert found.levels[0].figures.succeeded >= 2
    assert all(each.start < 1.5 for each in found.levels[0].outcomes)


def test_each_kind_of_failure_is_counted_and_the_rest_goes_on() -> None:
    numbers = count()
    replies: list[list[bytes]] = [
        [plain({"error": {"message": "later", "code": "queue_full"}}, 429)],
        [STREAM, chunk(delta("a")), CLOSE],
        [STREAM, chunk(delta("a")), chunk(event({"error": {"message": "died", "code": "gone"}})), END],
        [STREAM, chunk(delta(None, "stop")), END],
        [WAIT],
        [CLOSE],
        answer(["a"] * 4),
    ]

    def reply(body: Any) -> list[bytes]:
        return proper(body) if body["max_tokens"] == 1 else replies[next(numbers)]

    with chat_server(reply) as server:
        found = run(server.url, closed(1, requests=7), timeout=5.0)
    assert found.levels[0].figures.errors == {
        "HTTP 429 queue_full": 1,
        "cut off": 1,
        "error event gone": 1,
        "empty answer": 1,
        "timeout": 1,
        "connection": 1,
    }
    assert found.levels[0].figures.succeeded == 1


def test_requests_that_were_sent_again_are_noted() -> None:
    with chat_server(lambda body: [*proper(body), CLOSE]) as server:
        found = run(server.url, closed(1, requests=3, warmup=1))
    assert found.levels[0].figures.succeeded == 3
    resent = sum(each.resent for each in found.levels[0].outcomes)
    assert found.levels[0].figures.resent == resent
    assert any(f"{resent} requests were resent" in note for note in found.notes) == bool(resent)


def test_server_that_is_gone_is_not_asked_as_fast_as_can_be() -> None:
    """Failures without end filled the memory, where only a duration ends the level."""
    level = Level(kind="concurrency", value=1, number=0, requests=None, duration=0.5)
    with chat_server(lambda body: proper(body) if body["max_tokens"] == 1 else [CLOSE]) as server:
        found = run(server.url, [level])
    assert found.levels[0].figures.errors.keys() == {"connection"}
    assert found.levels[0].figures.failed <= 6


@pytest.mark.full
def test_stop_that_comes_with_the_work_is_heeded() -> None:
    """It came before the level had begun, and was forgotten."""
    level = Level(kind="concurrency", value=1, number=0, requests=None, duration=600.0)
    with null_server(ttft=0.01, itl=0.01) as url:
        workload = Workload(items=PROMPT, output_len=Span(4, 4))
        job = Job(url=url, headers={}, timeout=600.0, workload=workload, level=level)
        told = [RunJob(job), Stop(), Go(time.perf_counter())]
        command = [sys.executable, "-m", "ostro.measure.bench.worker"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(b"".join(msgspec.json.encode(message) + b"\n" for message in told))
            worker.stdin.flush()
            kinds = [msgspec.json.decode(worker.stdout.readline())["type"] for _ in range(3)]
            worker.stdin.close()
    assert kinds == ["Ready", "Progress", "Finished"]


@pytest.mark.full
def test_self_test_of_a_slow_server_is_short_and_an_interrupt_ends_it() -> None:
    """It took as long as the server had, and half of one passed for a whole."""
    slow = [Outcome(index=0, start=0.0, e2e=100.0, arrivals=[100.0], output_tokens=1)]
    with load_workers(1) as load:
        found = self_test(load, slow)
        assert found is not None
        assert found.pace < 1
        before, main = signal.getsignal(signal.SIGINT), threading.get_ident()

        def interrupt() -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if signal.getsignal(signal.SIGINT) is not before:
                    signal.pthread_kill(main, signal.SIGINT)
                    return
                time.sleep(0.01)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                self_test(load, slow)
        finally:
            interrupting.join()


@pytest.mark.full
def test_self_test_says_what_measuring_adds() -> None:
    with null_server(ttft=0.005, itl=0.005) as url:
        found = run(url, closed(4, requests=8), self_test=True).self_test
    assert found is not None
    assert found.concurrency >= 1
    assert found.added_ttft is not None
    assert found.added_itl is not None
    assert found.added_ttft.p50 > 0
    assert found.added_itl.p50 >= 0
    assert found.events_per_second > 0


def test_key_and_headers_are_sent_but_not_reported() -> None:
    with chat_server(proper) as server:
        found = run(server.url, closed(1, requests=1), Authorization="Bearer sk-secret", Team="red")
    assert all(b"Authorization: Bearer sk-secret\r\nTeam: red" in head for head in server.heads)
    told = json.dumps(found.as_json())
    assert "sk-secret" not in told
    assert "Authorization" in told


def test_load_process_ends_with_the_command_that_started_it() -> None:
    level = Level(kind="concurrency", value=1, number=0, requests=1)
    with chat_server(lambda body: [WAIT]) as server:
        workload = Workload(items=PROMPT, output_len=Span(4, 4))
        job = Job(url=server.url, headers={}, timeout=600.0, workload=workload, level=level)
        command = [sys.executable, "-m", "ostro.measure.bench.worker"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(msgspec.json.encode(RunJob(job)) + b"\n")
            worker.stdin.flush()
            assert b"Ready" in worker.stdout.readline()
            worker.stdin.write(msgspec.json.encode(Go(time.perf_counter())) + b"\n")
            worker.stdin.close()
            said = worker.stdout.read()
            assert worker.wait(60) == 0
    assert b'"Finished"' in said


# --- what is learnt of the server first -----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("refused", "note"),
    [
        ({"ignore_eos"}, "rejects ignore_eos"),
        ({"stream_options"}, "rejects stream_options"),
        ({"ignore_eos", "stream_options"}, "rejects ignore_eos"),
    ],
)
def test_fields_that_a_server_refuses_are_left_out(refused: set[str], note: str) -> None:
    def reply(body: Any) -> list[bytes]:
        if wrong := refused & body.keys():
            return [plain({"error": {"message": f"unknown {wrong}"}}, 400)]
        return proper(body)

    workload = Workload(items=PROMPT, output_len=Span(4, 4), ignore_eos=True)
    with chat_server(reply) as server:
        found = run(server.url, closed(1, requests=2), workload=workload)
    assert found.levels[0].figures.succeeded == 2
    assert any(note in each for each in found.notes)


def test_answers_that_end_early_are_noted() -> None:
    workload = Workload(items=PROMPT, output_len=Span(9, 9), ignore_eos=True)
    with chat_server(lambda body: answer(["a"] * 3)) as server:
        found = run(server.url, closed(1, requests=2), workload=workload)
    assert any("2 of 2 answers were shorter than requested" in note for note in found.notes)


def test_random_prompts_have_the_tokens_that_the_server_counts() -> None:
    """A server whose words are three tokens each, with a template of ten."""

    def reply(body: Any) -> list[bytes]:
        words = len(body["messages"][0]["content"].split())
        return answer(["a"] * body["max_tokens"], prompt_tokens=10 + 3 * words)

    workload = Workload(input_len=Span(100, 100), output_len=Span(2, 2))
    with chat_server(reply) as server:
        found = run(server.url, closed(1, requests=3), workload=workload)
    assert [each.input_tokens for each in found.levels[0].outcomes] == [100, 100, 100]


def test_server_that_counts_nothing_is_noted() -> None:
    def reply(body: Any) -> list[bytes]:
        return [STREAM, *[chunk(delta("a"))] * body["max_tokens"], chunk(delta(None, "length")), END]

    with chat_server(reply) as server:
        found = run(server.url, closed(1, requests=2), workload=Workload(input_len=Span(9, 9), output_len=Span(4, 4)))
    assert found.levels[0].figures.output_tokens == 8
    assert found.levels[0].figures.total_tokens_per_second is None
    assert any("events count as output tokens" in note for note in found.notes)


def test_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(Unreachable, match="Is the server up"):
        run("http://127.0.0.1:1", closed(1))


@pytest.mark.parametrize(("status", "said"), [(401, "who are you"), (400, "too long"), (503, "loading")])
def test_server_that_refuses_is_an_error(status: int, said: str) -> None:
    refusal = plain({"error": {"message": said}}, status)
    with chat_server(lambda body: [refusal]) as server, pytest.raises(ServerError, match=f"HTTP {status}: {said}"):
        run(server.url, closed(1))


def test_server_without_models_needs_the_name_of_one() -> None:
    nothing = plain({"data": []})
    with scripted_server(lambda path, body: [nothing]) as server, pytest.raises(ModelNotFound, match="--model"):
        run(server.url, closed(1))
