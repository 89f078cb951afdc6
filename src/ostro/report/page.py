"""Reports as one HTML file that needs nothing else. What models and servers say is text in it, never markup."""

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ostro.report.wording import visible


def render(package: str, **values: object) -> str:
    """The package's report.html. Its `style` is the look of all reports and then the package's report.css."""
    page = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_finalize, trim_blocks=True, lstrip_blocks=True
    )
    style = Markup(_text("ostro.report", "page.css") + _text(package, "report.css"))
    return page.from_string(_text(package, "report.html")).render(style=style, **values)


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _finalize(value: object) -> object:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
