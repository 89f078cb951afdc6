"""Durations are measured by a clock that nobody sets. The wall clock, which may jump by hours, only tells people and
files when something happened; each module that reads it stands here with its reason.
"""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

_STAMPS = "a date in an answer, which the API defines as wall time"
_REPORTS = "the date of a report"
_FILES = "compared with times that file systems give, or with those in manifests"
WALL_CLOCK = {
    "backends/cuda/precompile_process.py": "moments for a benchmark, which compares them with another process's",
    "backends/native/packed_cache.py": "the date in a manifest",
    "backends/tiers/page_bundles.py": _FILES,
    "cli/models.py": "shows when a model was last used",
    "cli/ps.py": "says for how long a server has run, which another process measured",
    "client/failures.py": "Retry-After may be a date",
    "engine/profile.py": "the name of a trace",
    "measure/bench/run.py": _REPORTS,
    "server/api.py": _STAMPS,
    "server/dialects/openai.py": _STAMPS,
    "server/dialects/responses/writer.py": _STAMPS,
    "server/listing.py": "the date of a start, for other processes",
    "server/log/text.py": "the time of a line of the log",
    "server/routes/relevance.py": _STAMPS,
    "server/telemetry/metrics.py": "vllm:lora_requests_info has a date as its value",
    "server/telemetry/tracing/tracer.py": "spans have wall times, all of one request from one reading",
    "simulation/run.py": _REPORTS,
    "sources/fetch.py": "the date in a manifest",
    "sources/pypi.py": "the date in a manifest",
    "sources/store.py": _FILES,
    "text/jinja_template.py": "templates may write today's date",
}
_TIME = {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "clock_gettime", "clock_gettime_ns"}
_DATETIME = {"now", "utcnow", "today"}


def test_only_these_modules_read_the_wall_clock() -> None:
    found = {
        str(path.relative_to(SOURCE / "ostro")) for path in SOURCE.rglob("*.py") if reads_wall_clock(path.read_text())
    }
    assert found == WALL_CLOCK.keys()


def reads_wall_clock(source: str) -> bool:
    tree = ast.parse(source)
    return any(_is_reading(node) or _imports_reading(node) for node in ast.walk(tree))


def _is_reading(node: ast.AST) -> bool:
    """`time.time` and the like, also where it is handed on instead of called."""
    match node:
        case ast.Attribute(value=ast.Name(id="time"), attr=name):
            return name in _TIME
        case ast.Attribute(value=ast.Name(id="datetime" | "date") | ast.Attribute(attr="datetime"), attr=name):
            return name in _DATETIME
    return False


def _imports_reading(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "time" and any(each.name in _TIME for each in node.names)


def test_readings_of_the_wall_clock_are_found() -> None:
    for source in (
        "import time\ntime.time()",
        "import time\nf(clock=time.time)",
        "from time import time",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import date\ndate.today()",
    ):
        assert reads_wall_clock(source), source
    assert not reads_wall_clock("import time\ntime.monotonic() + time.perf_counter()")
