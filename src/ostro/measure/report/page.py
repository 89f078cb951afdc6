"""Reports as self-contained HTML files. Output of models and servers is escaped text, never markup."""

from dataclasses import dataclass
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from ostro.measure.report.wording import visible


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure and its meaning."""

    figure: str
    meaning: str
    detail: str
    mood: str = ""
    """Verdict for the tile's colour: good, bad or empty."""


def render(package: str, *, title: str, **values: object) -> str:
    """Renders the package's report.html in the common page frame; its report.css extends the common style."""
    frame = DictLoader({"page.html": _text("ostro.measure.report", "page.html")})
    page = Environment(
        loader=frame,
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup(_text("ostro.measure.report", "page.css") + _text(package, "report.css"))
    return page.from_string(_text(package, "report.html")).render(title=title, style=style, **values)


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _finalize(value: object) -> object:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
