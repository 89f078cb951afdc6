"""Every metric and label that the board, the alerts and the docs name is one that a server exports."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from live_server import live_server
from prometheus_client.parser import text_string_to_metric_families

BOARD = ROOT / "deploy" / "grafana" / "ostro.json"
PROMETHEUS = ROOT / "deploy" / "prometheus"
DOCS = ROOT / "docs" / "observability.md"

# What Prometheus adds to what it scrapes, and its own metrics.
TARGET_LABELS = {"instance", "job"}
OF_PROMETHEUS = {"up": {*TARGET_LABELS}}

promtool = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(promtool is None, reason="promtool is not here; Debian's prometheus has it")


# --- what a server exports ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    families: dict[str, tuple[str, frozenset[str]]]
    """By name: its type and labels."""
    samples: dict[str, set[str]]
    """By name, as queries have it: its labels."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    with live_server(tmp_path_factory.mktemp("metrics")) as server, server.client() as client:
        body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True, "stream": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        text = client.get("/metrics").text
    families, samples = {}, dict[str, set[str]]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
        if not family.name.endswith("_created"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            families[name] = (family.type, frozenset(labels))
    return Exported(families, samples)


def test_docs_list_every_metric_with_its_type_and_labels(exported: Exported) -> None:
    rows = re.findall(r"^\| `([a-z0-9_:]+)` \| (\w+) \| ([^|]*)\| [^|]+ \|$", DOCS.read_text(), re.MULTILINE)
    told = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    # The labels of what this server has none of are not seen: tests/server/test_metrics.py has a model with adapters.
    found = {name: (kind, labels or told[name][1]) for name, (kind, labels) in exported.families.items()}
    assert told == found


# --- queries --------------------------------------------------------------------------------------------------------


@dataclass
class Query:
    """What a PromQL expression names."""

    selected: list[tuple[str, set[str]]] = field(default_factory=list)
    """Metrics, each with the labels that it is chosen by."""
    grouped: set[str] = field(default_factory=set)


_TOKEN = re.compile(
    r"""(?P<text>"[^"]*"|'[^']*')|\[(?P<window>[^\]]*)\]|(?P<number>\d[\w.]*)|(?P<name>[a-zA-Z_:][\w:]*)|(?P<sign>\S)"""
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_OPERATORS = {"and", "or", "unless", "bool", "offset"}


def read_query(expression: str) -> Query:
    tokens = [found for found in _TOKEN.finditer(expression) if found["window"] is None]
    query, place = Query(), 0
    while place < len(tokens):
        name, following = tokens[place]["name"], tokens[place + 1].group() if place + 1 < len(tokens) else ""
        place += 1
        if name in _GROUPING and following == "(":
            names, place = _names_until(tokens, place + 1, ")")
            query.grouped |= names
        elif name is not None and name not in _OPERATORS and following not in ("(", "by", "without"):
            labels: set[str] = set()
            if following == "{":
                labels, place = _names_until(tokens, place + 1, "}")
            query.selected.append((name, labels))
    return query


def _names_until(tokens: list[re.Match[str]], place: int, end: str) -> tuple[set[str], int]:
    names = set()
    while tokens[place].group() != end:
        if tokens[place]["name"] is not None:
            names.add(tokens[place]["name"])
        place += 1
    return names, place + 1


def test_reader_of_queries_finds_metrics_and_labels() -> None:
    query = read_query(
        'histogram_quantile(0.95, sum by (le, a) (rate(x:y_bucket{b=~"c|d",e!="f{"}[5m]))) > 1e3 '
        "and on (g) z offset 5m or vector(0)"
    )
    assert query.selected == [("x:y_bucket", {"b", "e"}), ("z", set())]
    assert query.grouped == {"le", "a", "g"}


def board_queries() -> Iterator[tuple[str, str]]:
    board = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", target["expr"]


@dataclass(frozen=True)
class Rule:
    alert: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]


def rules() -> list[Rule]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [
        Rule(each["alert"], each["expr"], each["labels"], each["annotations"])
        for group in groups
        for each in group["rules"]
    ]


def all_queries() -> list[tuple[str, str]]:
    return [*board_queries(), *((rule.alert, rule.expr) for rule in rules())]


@pytest.mark.parametrize(("name", "expression"), all_queries(), ids=[name for name, _ in all_queries()])
def test_query_names_metrics_and_labels_that_are_exported(exported: Exported, name: str, expression: str) -> None:
    known = exported.samples | OF_PROMETHEUS
    query = read_query(expression)
    assert query.selected
    assert [metric for metric, _ in query.selected if metric not in known] == []
    for metric, labels in query.selected:
        assert labels <= known[metric] | TARGET_LABELS
    assert query.grouped <= {label for metric, _ in query.selected for label in known[metric]} | TARGET_LABELS


def test_legends_name_labels_that_their_queries_keep(exported: Exported) -> None:
    board = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            query = read_query(target["expr"])
            kept = query.grouped if " by (" in target["expr"] else {"model_name", *TARGET_LABELS}
            assert {*re.findall(r"{{(\w+)}}", target["legendFormat"])} <= kept, panel["title"]


def test_variables_of_the_board_are_filled_from_exported_labels(exported: Exported) -> None:
    variables = {each["name"]: each for each in json.loads(BOARD.read_text())["templating"]["list"]}
    assert list(variables) == ["datasource", "instance", "model"]
    for name in ("instance", "model"):
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variables[name]["query"]["query"])
        assert found is not None
        [(metric, labels)] = read_query(found[1]).selected
        assert {found[2], *labels} <= exported.samples[metric] | TARGET_LABELS


def test_board_is_one_that_grafana_can_import() -> None:
    board = json.loads(BOARD.read_text())
    assert (board["uid"], board["schemaVersion"] >= 39) == ("ostro", True)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(cells)) == len(cells), "panels overlap"
    sources = re.findall(r'"uid": "(\$?[^"]+)"', BOARD.read_text())
    assert {*sources} == {"ostro", "${datasource}"}
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Latency", "Engine", "Models"]


def test_every_alert_says_what_it_means_and_where_to_read_on() -> None:
    headings = {line.removeprefix("### ").strip() for line in DOCS.read_text().splitlines() if line.startswith("### ")}
    for rule in rules():
        assert rule.labels["severity"] in ("warning", "critical")
        assert rule.annotations.keys() == {"summary", "description", "runbook"}
        assert rule.annotations["runbook"] == f"docs/observability.md#{rule.alert.lower()}"
    assert headings == {rule.alert for rule in rules()}


# --- by Prometheus itself -------------------------------------------------------------------------------------------


def run_promtool(*args: str) -> None:
    assert promtool is not None
    ran = subprocess.run([promtool, *args], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_promtool
def test_prometheus_takes_the_config_and_the_rules() -> None:
    run_promtool("check", "config", "prometheus.yml")
    run_promtool("check", "rules", "alerts.yml")


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    run_promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))


@needs_promtool
def test_prometheus_can_read_the_boards_queries(tmp_path: Path) -> None:
    queries = [expression.replace("$__rate_interval", "5m") for _, expression in board_queries()]
    recorded = [{"record": f"q{number}", "expr": each} for number, each in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": recorded}]}))
    run_promtool("check", "rules", str(file))
