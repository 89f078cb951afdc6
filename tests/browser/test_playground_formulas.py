"""Formulas and tables in the playground's answers: TeX becomes MathML, prices stay prices, words stay whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from browser_fixtures import Visit
from live_server import LiveServer
from page_checks import flaws, is_wider_than_the_screen
from playground_page import fixed_answer, say, streamed, until, until_true, wait_for_answer

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.full

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
DESKTOP = {"viewport": {"width": 1440, "height": 900}}

SAMPLE = r"""# On \(e^x\)

Solve \(ax^2 + bx + c = 0\) where **$a \neq 0$**, for $5 or $10:
\[
x
=
\frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
\]
and *so \(a*b\) on*.

1. First $$\int_0^\infty e^{-x} \, dx$$
2. Then
   \[
   \begin{pmatrix} a & b \\[2em] c & d \end{pmatrix}
   \]

$$

\begin{aligned} a &= b \\ &= c \end{aligned}

$$

| \(f\) | $f'$ |
|--|--|
| $\sin x$ | $\cos x$ |

Code: `\(x\)`, `$y$`.

```
\[ z \]
```
"""


def drawn(page: Page) -> list[str]:
    """What each formula of the answers says."""
    until_true(page, "document.querySelector('.formula:not(:has(math, .tex))') === null")
    return [text.strip() for text in page.locator(".formula").all_text_contents()]


def answered(page: Page, text: str) -> None:
    fixed_answer(page, *text)
    say(page, "Explain.")
    wait_for_answer(page)


READ = """async ([texts, growing]) => {
  const { tokensWithFormulas } = await import("/ui/formula-syntax.js");
  const formulas = (tokens) => tokens.flatMap((token) => {
    if (token.type === "formula") return [[token.tex, token.display, token.open]];
    const inner = [token.tokens, token.items, token.header, ...(token.rows ?? [])];
    return inner.flatMap((each) => (each ? formulas(each) : []));
  });
  return texts.map((text) => formulas(tokensWithFormulas(text, { growing })));
}"""

NO_FORMULAS = [
    "It costs $5 and $10, not US$5 or 5$.",
    "$5-$10, $5/$6, $1,000 and $HOME/$USER",
    "I paid $5 a night and he paid 10$.",
    "Restaurants ($$) and ($$), also\n$$ cheap\n$$$ dear",
    "`\\(x\\)` and `$x$` and cost $5 `$`",
    "```\n$$x$$\n```\n\n    \\[x\\]",
    "\\\\(x\\\\) and \\$x\\$ and \\(\\) and \\[ \\]",
    "$ x $ and $x $ and $\nx$",
    "use \\( to match a bracket",
    "\\(x\n\ny\\)",
]
FORMULAS: dict[str, list[list[Any]]] = {
    r"\(x_1*y\) and *z*": [["x_1*y", False, False]],
    r"a *b \(c*d\) e* f": [["c*d", False, False]],
    "the $n$th, an $x$-axis, $f(x)$.": [["n", False, False], ["x", False, False], ["f(x)", False, False]],
    "It costs $5, and $x$ is $5$.": [["x", False, False], ["5", False, False]],
    "Thus:\n\\[\nx\n=\ny\n\\]\nwhere": [["x\n=\ny", True, False]],
    "$$\n- a\n+ b\n$$.": [["- a\n+ b.", True, False]],
    "> \\[ x \\]\n\n- $$y$$": [["x", True, False], ["y", True, False]],
    r"\[ a \\[2em] b \]": [[r"a \\[2em] b", True, False]],
    r"[\(x\)](https://example.org)": [["x", False, False]],
    r"left \(\frac{1}{2": [[r"\frac{1}{2", False, True]],
}


def test_formulas_are_told_from_prices_code_and_escapes(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    assert page.evaluate(READ, [NO_FORMULAS, False]) == [[] for _ in NO_FORMULAS]
    assert page.evaluate(READ, [list(FORMULAS), False]) == list(FORMULAS.values())


def test_formulas_are_drawn_as_mathml_and_everything_else_is_left_alone(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    answered(page, SAMPLE)
    assert len(drawn(page)) == 12
    assert page.locator(".formula .tex").count() == 0
    answer = page.locator(".turns .assistant .prose")
    assert answer.locator("math mfrac msqrt").count() == 1
    assert answer.locator("h4 math msup").count() == 1
    assert answer.locator("strong math").count() == 1
    assert answer.locator("em").first.text_content() == "so a*b on".replace("*", "∗")
    assert answer.locator("td math").count() == 2
    assert answer.locator("ol > li math").count() == 2
    assert answer.locator("math[display=block]").count() == 4
    assert "for $5 or $10:" in answer.inner_text()
    assert answer.locator("code").all_text_contents() == ["\\(x\\)", "$y$", "\\[ z \\]"]
    # The page's policy allows no styles in attributes, and the console has not complained.
    assert page.locator("math [style]").evaluate_all("nodes => nodes.every((each) => each.style.length)")
    page.reload()
    assert len(drawn(page)) == 12


def test_library_is_loaded_with_the_first_formula(playground: LiveServer, visit: Visit) -> None:
    """A font that another page has brought into its memory is there from the start in Chromium, the library is not."""
    page = visit(playground)
    names = "performance.getEntriesByType('resource').map((each) => each.name)"
    answered(page, "It costs $5, or $6.")
    assert not [each for each in page.evaluate(names) if "temml" in each]
    answered(page, "But \\(x\\).")
    page.locator("math").wait_for()
    assert [each for each in page.evaluate(names) if "temml" in each]
    until_true(page, f"{names}.some((each) => each.includes('stix'))")


def test_copy_gives_the_formulas_source(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, permissions=["clipboard-read", "clipboard-write"])
    answered(page, "So \\(x^2\\).")
    page.locator("math").wait_for()
    page.locator(".turns .assistant").get_by_role("button", name="Copy", exact=True).click()
    until_true(page, "document.getElementById('announcer').textContent === 'Copied.'")
    assert page.evaluate("navigator.clipboard.readText()") == "So \\(x^2\\)."


def test_formula_that_is_still_coming_is_its_source_and_nothing_flickers(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    answered(page, "\\(x\\)")
    page.locator("math").wait_for()
    text = "Thus:\n\\[\nx_1*y\n=\n- \\frac{a}{b}*z_2\n\\]\nand \\(a*b\\) and $\\sqrt{2}*3$, then\n\n$$\nx\n$$\n"
    steps = page.evaluate(
        """async (text) => {
          const { Markdown } = await import("/ui/markdown.js");
          const shown = new Markdown();
          const steps = [];
          for (let end = 1; end <= text.length; end++) {
            shown.update(text.slice(0, end));
            const odd = shown.node.querySelectorAll("em, strong, h4, li, merror").length;
            steps.push([shown.node.querySelectorAll("math").length, odd, shown.node.textContent]);
          }
          return steps;
        }""",
        text,
    )
    counts = [count for count, _, _ in steps]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {odd for _, odd, _ in steps} == {0}
    # The command is there from its first letters on.
    for length, (_, _, shown) in enumerate(steps, 1):
        if text[:length].endswith("\\frac{a"):
            assert "\\[\nx_1*y\n=\n- \\frac{a" in shown


UNREADABLE = [
    r"\(\frac{1}{\)",
    r"\(\nosuchcommand x\)",
    r"\(\href{javascript:canary()}{x}\)",
    r"\(\url{https://evil.example/}\)",
    r"\[\includegraphics{https://evil.example/x.png}\]",
    r"\(\style{background:url(https://evil.example/)}{x}\)",
    r"\(\class{coming}{x}\) \(\id{chat}{x}\) \(\data{a=b}{x}\)",
    r"\(\color{url(https://evil.example/)}x\)",
    r"\[\def\a#1{#1#1}\a{\a{\a{x}}}\]",
    r"\(\gdef\x{1}\x\) \(\newcommand{\y}{2}\y\) \(\let\z=3\z\)",
    r"\(\def\x{\x\x}\x\)",
    "\\(" + "{" * 1900 + "}" * 1900 + "\\)",
    "\\(" + "\\sqrt{" * 400 + "x" + "}" * 400 + "\\)",
    "\\[" + r"\begin{matrix}" * 100 + r"\end{matrix}" * 100 + "\\]",
]


def test_what_cannot_be_read_or_would_grow_is_shown_as_its_source(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    answered(page, "\\(x\\)\n\n" + "\n\n".join(UNREADABLE))
    page.locator("math").wait_for()
    assert drawn(page) == [
        "x",
        *(part for text in UNREADABLE for part in text.replace("\\) \\(", "\\)\n\\(").split("\n")),
    ]
    assert page.locator("math").count() == 1
    assert page.evaluate("globalThis.canary === undefined")


LARGE = {
    "letters": "x+" * 1900,
    "cells": r"\begin{matrix}" + "&" * 3900 + r"\end{matrix}",
    "rules": r"\rule{9999em}{9999em}\kern9999em x \\[9999em] y",
    "primes": "x" + "'" * 3900,
}


def test_large_formula_is_bounded(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, **DESKTOP)
    for name, tex in LARGE.items():
        page.get_by_role("button", name="New", exact=True).click()
        answered(page, f"\\[{tex}\\]")
        assert len(drawn(page)) == 1
        assert page.locator(".formula *").count() < 12_000, name
        size = page.locator(".formula").bounding_box()
        assert size is not None
        assert size["height"] < 3000, name
        assert not is_wider_than_the_screen(page), name


def test_library_that_cannot_be_loaded_leaves_the_source_and_is_tried_again(
    playground: LiveServer, visit: Visit, complaints: Any
) -> None:
    complaints.expected.append("ERR_FAILED")
    page = visit(playground)
    page.route("**/temml.min.js", lambda route: route.abort())
    answered(page, "So \\(x^2\\).")
    until_true(page, "document.querySelector('script[src*=temml]') === null")
    assert page.locator(".formula").text_content() == "\\(x^2\\)"
    page.unroute("**/temml.min.js")
    page.unroute("**/v1/chat/completions")
    answered(page, "So \\(y^2\\).")
    page.locator("math").wait_for()


@pytest.mark.parametrize("options", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_wide_formulas_scroll_by_themselves_and_have_names(
    playground: LiveServer, visit: Visit, options: dict[str, Any]
) -> None:
    page = visit(playground, reduced_motion="reduce", **options)
    wide = " ".join(f"x_{{{index}}} \\quad" for index in range(60))
    answered(page, f"Inline \\({{{wide}}}\\) and\n\n$${wide}$$\n\nand \\(y\\).\n")
    until(lambda: page.locator(".formula.wide").count() == 2, "they are not made scrollable")
    assert not is_wider_than_the_screen(page)
    for box in page.locator(".formula.wide").all():
        assert box.evaluate("node => node.scrollWidth > node.clientWidth + 100")
        assert box.get_attribute("aria-label") == "Formula"
        box.press("ArrowRight")
        until(lambda box=box: box.evaluate("node => node.scrollLeft > 0"), "it does not scroll")  # type: ignore[misc]
    assert page.locator(".formula").last.get_attribute("tabindex") is None
    assert flaws(page) == []


# --- tables ---------------------------------------------------------------------------------------------------------

WORDS = ("internationalisation", "straightforwardly", "incomprehensibility", "counterrevolutionary", "misunderstanding")


@pytest.mark.parametrize("options", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_tables_never_break_inside_words(playground: LiveServer, visit: Visit, options: dict[str, Any]) -> None:
    page = visit(playground, **options)
    row = "| " + " | ".join(f"{word} and so on {word}" for word in WORDS * 2) + " |"
    answered(page, f"{row}\n|{'--|' * 10}\n{row}\n\n{'word' * 200}\n")
    # A word that is broken has rectangles in two lines.
    broken = page.locator(".markdown table").evaluate(
        """table => {
          const walker = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
          const broken = [];
          let words = 0;
          while (walker.nextNode()) {
            for (const { index, 0: word } of walker.currentNode.data.matchAll(/\\S+/g)) {
              const range = document.createRange();
              range.setStart(walker.currentNode, index);
              range.setEnd(walker.currentNode, index + word.length);
              words += 1;
              if (new Set([...range.getClientRects()].map((each) => Math.round(each.top))).size > 1) broken.push(word);
            }
          }
          return [words, broken];
        }"""
    )
    assert broken == [100, []]
    assert page.locator(".table").evaluate("node => node.scrollWidth > node.clientWidth + 100")
    assert not is_wider_than_the_screen(page)
    assert flaws(page) == []


def test_formulas_in_a_conversation_that_is_opened_keep_its_end_in_view(playground: LiveServer, visit: Visit) -> None:
    """They are drawn a moment after the rest, and taller than their source."""
    page = visit(playground)

    def answer(route: Route) -> None:
        question = json.loads(route.request.post_data or "")["messages"][-1]["content"]
        body = streamed("\n\n".join(f"\\[\\frac{{\\frac{{a}}{{{n}}}}}{{b}}\\]" for n in range(30)) + f"\n\n{question}")
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    say(page, "The end.")
    wait_for_answer(page)
    page.reload()
    until(lambda: page.locator("math").count() == 30, "they are not drawn")
    until_true(
        page, "(log => log.scrollHeight - log.scrollTop - log.clientHeight < 80)(document.getElementById('chat-log'))"
    )
