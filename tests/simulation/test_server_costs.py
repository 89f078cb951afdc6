"""What a server adds to its engine, from load on it."""

from itertools import count
from typing import Any

import msgspec
import pytest
from scripted_server import DONE, END, STREAM, chunk, delta, event, plain, scripted_server, usage
from simulated import by_clients, cost_table, load, simulated

from ostro.measure.bench.jobs import Level
from ostro.measure.bench.outcomes import EMPTY
from ostro.measure.bench.workload import Span, WordTokens, Workload
from ostro.simulation.costs import CostTable
from ostro.simulation.server_costs import Probe, Probes, probe_server, with_server


def _probes(table: CostTable) -> Probes:
    """Answers of a server that behaves exactly as the table says."""
    many = by_clients(8, 8, warmup=1)
    one = by_clients(1, 16, warmup=1)
    inputs = Span(20, 120)
    around = WordTokens(per_word=1.0, around=6.0)
    chat, completions = load(endpoint="chat", inputs=inputs, outputs=Span(2, 2), words=around), load(inputs=inputs)
    together = load(inputs=Span(8, 8), outputs=Span(32, 32))

    def probe(workload: Workload, level: Level) -> Probe:
        outcomes = simulated(level, table, workload).bench.levels[0].outcomes
        return Probe(workload=workload, level=level, outcomes=outcomes)

    return Probes(
        alone={"chat": probe(chat, one), "completions": probe(completions, one)},
        together=probe(together, many),
        bursts=probe(load(endpoint="chat", inputs=Span(8, 24), outputs=Span(1, 1), words=around), by_clients(8, 32)),
    )


def test_costs_of_a_server_are_found_from_load_on_it() -> None:
    true = cost_table(request=0.020, event=0.003)
    chat = msgspec.structs.replace(true.endpoints["chat"], prompt_token=0.0005)
    true = msgspec.structs.replace(true, endpoints={**true.endpoints, "chat": chat})
    bare = msgspec.structs.replace(true, endpoints={}, event=0.0)
    found = with_server(bare, _probes(true))
    assert found.endpoints["chat"].request == pytest.approx(0.020)
    assert found.endpoints["completions"].request == pytest.approx(0.020)
    assert found.endpoints["chat"].prompt_token == pytest.approx(0.0005)
    assert found.endpoints["chat"].tokens_before == 4
    assert found.endpoints["chat"].tokens_after == 2
    assert found.event == pytest.approx(0.003)
    assert found.contention == 0.0


def test_what_the_api_process_takes_from_steps_beside_it_is_found_from_bursts() -> None:
    true = cost_table(request=0.020)
    true = msgspec.structs.replace(true, contention=0.6)
    found = with_server(msgspec.structs.replace(true, endpoints={}, contention=0.0), _probes(true))
    assert found.endpoints["chat"].request == pytest.approx(0.020)
    assert found.contention == pytest.approx(0.6, abs=0.15)


def test_a_server_that_is_faster_than_its_engine_was_costs_nothing() -> None:
    """The engine is timed at another time than the server, perhaps on a busier machine."""
    fast = cost_table()
    slow = msgspec.structs.replace(
        fast, step=msgspec.structs.replace(fast.step, decode=[(1, 0.01)], mixed=[(1, 0.1)]), endpoints={}
    )
    found = with_server(slow, _probes(fast))
    assert found.event == found.contention == 0.0
    assert {(each.request, each.prompt_token) for each in found.endpoints.values()} == {(0.0, 0.0)}


@pytest.mark.full
def test_answers_of_one_token_without_text_are_no_failures() -> None:
    """A sampled token is now and then a special one; the measurement then ended with "empty answer"."""
    asked = count()

    def script(path: str, body: Any) -> list[bytes]:
        if path == "/v1/models":
            return [plain({"data": [{"id": "m"}]})]
        word = "" if body["max_tokens"] == 1 and next(asked) % 2 else "a"
        text = delta(word, "length") if "messages" in body else event({"choices": [{"text": word}]})
        return [STREAM, *map(chunk, [text, usage(len(str(body)), body["max_tokens"]), DONE]), END]

    with scripted_server(script) as server:
        probes = probe_server(server.url, {}, max_seq_len=64)
        assert all(body["ignore_eos"] for body in server.bodies if body is not None)
    assert {each.error for each in probes.bursts.outcomes} == {None, EMPTY}
    assert with_server(msgspec.structs.replace(cost_table(), endpoints={}), probes).contention >= 0.0
