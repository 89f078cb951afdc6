"""The report as a browser would read it: parsed, not searched for strings."""

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import FAILED, answer, comparison

from ostro.measure.compare.answers import Failure, Outcome, Token
from ostro.measure.compare.report import MOST_ROWS, histogram, report, scatter
from ostro.measure.compare.run import Comparison

# Elements that have no end.
VOID = {"meta"}
# All that the page is made of; what hostile text could bring in is not among them.
KNOWN = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "footer", "h1", "h2", "p", "div"),
    *("span", "strong", "em", "mark", "dl", "dt", "dd", "figure", "figcaption", "table", "thead", "tbody", "tr", "th"),
    *("td", "svg", "line", "rect", "circle", "text"),
}
HOSTILE = [
    "<script>alert(1)</script>",
    "</div></td></table></body><h1>mine</h1>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style><link rel=stylesheet href=//evil>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; &amp; &#x3c;",
    "\x00\x1b[2J\u202egnp.exe\u2066",
    "\ud800",
    "<!-- -->]]><![CDATA[",
]


class Page(HTMLParser):
    """The tree's shape, checked while it is read, and the text by class of element."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.append((" ".join(self._open[-1]), data))

    def of(self, kind: str) -> list[str]:
        return [text for where, text in self.texts if where == kind]


def page(found: Comparison) -> Page:
    return Page(report(found))


def test_the_summary_comes_first_and_says_it_at_a_glance() -> None:
    found = page(comparison([("same", "same")] * 9 + [("abc", "abd")]))
    assert found.of("p figure")[:2] == ["90 %", "2.00×"]
    assert found.of("p meaning")[:2] == ["same output", "A is 2.00× as fast as B"]
    assert found.of("p detail")[0] == "9 of 10 outputs are the same"


def test_a_difference_is_marked_from_its_first_character_on() -> None:
    found = page(comparison([("the fox ran", "the fox"), ("same", "same"), ("one", "two")]))
    assert found.of("div text")[:1] == ["prompt 1"]
    assert found.of("span common") == ["the fox", "the fox"]
    # The legend is marked too.
    assert found.of("mark ")[1:] == [" ran", "one", "two"]
    assert found.of("em end") == ["ends here"]


def test_log_probabilities_are_summed_up_where_both_sides_gave_them() -> None:
    a, b = (answer("x", tokens=[Token("x", 1, logprob)]) for logprob in (-1.0, -1.25))
    assert "0.25" in page(comparison([(a, b)])).of("p figure")
    assert page(comparison([("x", "x")])).of("p meaning") == ["same output", "A is 2.00× as fast as B"]


def test_there_is_a_plot_of_latencies_of_first_tokens_and_of_prompts() -> None:
    found = page(comparison([("x", "y"), ("x", "x"), (FAILED, "x")]))
    assert found.tags.count("svg") == 3
    assert found.tags.count("circle") == 2


def test_the_page_needs_nothing_from_outside() -> None:
    source = report(comparison([("x", "y"), (FAILED, "x")]))
    found = Page(source)
    assert set(found.tags) <= KNOWN
    assert not {"src", "href", "style", "onload"} & {name for name, _ in found.attributes}
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    for outward in ("url(", "@import", "http://www", "https://"):
        assert outward not in source


@pytest.mark.cases(3)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_others_say_is_text_wherever_it_stands(hostile: str) -> None:
    """In a prompt, an answer, an error, a model's name, a stop."""
    pairs: list[tuple[Outcome | str, Outcome | str]] = [(hostile, "x" + hostile), (Failure(hostile, 1.0), "x")]
    found = comparison(pairs, prompts=[hostile, ({"role": hostile, "content": hostile},)], model=hostile)
    plain = page(comparison([("a", "xa"), (Failure("b", 1.0), "x")]))
    read = page(found)
    assert read.tags == plain.tags
    assert [name for name, _ in read.attributes] == [name for name, _ in plain.attributes]
    report(found).encode()
    if hostile.isprintable():
        assert read.of("mark ")[1] == hostile
        assert hostile in read.of("strong ")


@pytest.mark.full
@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_leaves_the_page_as_it_is(one: str, other: str) -> None:
    read = page(comparison([("a" + one, "b" + other)], prompts=[one]))
    assert set(read.tags) <= KNOWN
    shown = "".join(read.of("mark ")[1:])
    assert not set("\x00\x1b\u202e\u2066") & set(shown)
    if one.isprintable() and one:
        assert f"a{one}" in read.of("mark ")


def test_a_long_report_ends_somewhere() -> None:
    found = page(comparison([("a", "b")] * (MOST_ROWS + 3)))
    assert found.tags.count("em") == 0
    assert len(found.of("span number")) == MOST_ROWS
    assert any(text.startswith("3 more rows") for text in found.of("p note"))


def test_a_report_of_nothing_but_failures_has_no_plots() -> None:
    found = page(comparison([(FAILED, FAILED)]))
    assert found.tags.count("svg") == 0
    assert found.of("p figure")[:2] == ["0 %", "–"]
    assert found.of("h2 ")[-1] == "Failed requests"


@given(st.lists(st.floats(0, 1e4), max_size=20), st.lists(st.floats(0, 1e4), max_size=20))
def test_every_bar_lies_within_the_plot(a: list[float], b: list[float]) -> None:
    for plot in (histogram(a, b, label="latency"), scatter(list(zip(a, b, strict=False)), label="latency")):
        read = Page(str(plot))
        places = {
            name: [float(value) for key, value in read.attributes if key == name] for name in ("x", "x1", "cx", "y")
        }
        assert all(-1 <= value <= 441 for values in places.values() for value in values)
        assert "nan" not in plot
