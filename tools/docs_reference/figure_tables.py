"""Measured figures over time, from bench/history.json."""

import bench_history
from docs_reference.markup import code, table


def parts() -> dict[str, str]:
    return {"figures": "\n".join(map(_section, bench_history.SHOWN))}


def _section(name: str) -> str:
    shown = bench_history.SHOWN[name]
    rows = [
        (each["date"], code(each["commit"]), *(_number(each["figures"].get(figure)) for figure in shown.figures))
        for each in bench_history.read()[name]
    ]
    source = f"[`bench/results/{name}`](../bench/results/{name})"
    head = f"## {shown.title}\n\n{shown.machine}; {code(shown.command)}; {source}.\n\n"
    return head + table(("date", "commit", *shown.figures), rows)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
