"""Chat templates written to hang the server or to fill its memory: every way that a review or a reader has thought of.

`{{ "%1500000000d" % 1 }}` once took 1.4 GB of the API process, which no interception of operators had foreseen. So the
bombs are rendered as the server renders templates, and what is asserted is the kernel's word: the memory that the
process had at its peak.
"""

import resource
from pathlib import Path

import pytest

from ostro.errors import BadRequest
from ostro.text.chat import ChatTemplate, Message
from ostro.text.renderer import Renderer, RenderLimits

HELLO: list[Message] = [{"role": "user", "content": "Hello"}]
LIMITS = RenderLimits(seconds=0.2, bytes=128 << 20)

LARGE = {
    "format a width": '{{ "%1500000000d" % 1 }}',
    "format a width from an argument": '{{ "%*d" % (1500000000, 1) }}',
    "format a precision": '{{ "%.1500000000f" % 1 }}',
    "format filter": '{{ "%1500000000s" | format("x") }}',
    "format method": '{{ "{:1500000000}".format(1) }}',
    "nested format method": '{{ "{:{}}".format(1, 1500000000) }}',
    "repetition": "{{ 'a' * 10 ** 9 }}",
    "list repetition": "{% set r = [0] * 9999999999 %}",
    "list of a range": "{% set r = range(99999) | list %}{% set n = namespace(r=r) %}"
    "{% for i in range(99) %}{% set n.r = n.r + n.r %}{% endfor %}",
    "power": "{{ 9 ** 99999999 }}",
    "power of two": "{{ (2 ** (10 ** 10)) | string }}",
    "product of large numbers": "{% set n = namespace(v=7) %}{% for i in range(99) %}{% set n.v = n.v * n.v %}"
    "{% endfor %}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10 ** 9) }}",
    "replace": "{% set s = 'x' * 99999 %}{{ s.replace('x', s) }}",
    "replace filter": "{% set s = 'x' * 99999 %}{{ s | replace('x', s) }}",
    "join": "{% set s = 'x' * 99999 %}{{ s.join(['a'] * 99999) }}",
    "join filter": "{% set s = 'x' * 99999 %}{{ (['a'] * 99999) | join(s) }}",
    "indent": "{{ ('x\\n' * 99999) | indent(99999) }}",
    "wordwrap": "{{ ('x ' * 999) | wordwrap(1, wrapstring='y' * 999999) }}",
    "batch": "{% for row in [1] | batch(10 ** 9, 0) %}{% endfor %}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "+": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "~": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "block": "{% set n = namespace(s=1) %}{% for i in [0]*99 %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "output": "{% set s = 'x' * 99999 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "text of Jinja's own": "{{ lipsum(n=10 ** 6) }}",
    "JSON": "{{ ([[0] * 999] * 99999) | tojson(indent=99) }}",
    "nested lists": "{% set n = namespace(l=[0]) %}{% for i in range(40) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
    "{{ n.l }}",
}
LONG = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop over a list": "{% set r = [0] * 99999 %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "one call": "{{ ('a' * 999999).count('a' * 499999 ~ 'b' ~ 'a' * 4999) * 0 }}{{ 3 ** 9999999 }}",
    "digits of a number": "{{ (10 ** 999999) // 7 }}{% for a in range(99999) %}{{ 3 ** 999999 }}{% endfor %}",
    "sorting": "{% for a in range(99999) %}{{ (range(99999) | list | sort(reverse=true))[0] }}{% endfor %}",
    "testing": "{{ range(99999) | select('in', range(99999) | list) | list | length }}",
}


def growth_of_ours() -> int:
    """Bytes of this process's own memory, which no template may touch."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# One of each kind; the others run with `make test-hostile`.
QUICK = {"format a width", "repetition", "replace", "output", "loop", "branching recursion"}
BOMBS = [
    pytest.param(source, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, source in (LARGE | LONG).items()
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("source", BOMBS)
def test_template_bomb_goes_off_within_its_limits(source: str) -> None:
    renderer = Renderer(ChatTemplate(source), limits=LIMITS)
    before = growth_of_ours()
    with pytest.raises(BadRequest, match="The chat template failed"):
        renderer.render(HELLO)
    assert growth_of_ours() - before < 32 << 20
    if renderer.pid is not None:
        # It refused the bomb and lives.
        peak = Path(f"/proc/{renderer.pid}/status").read_text().partition("VmPeak:")[2].split()[0]
        assert int(peak) << 10 <= LIMITS.bytes


@pytest.mark.full
def test_deeply_nested_template_is_a_refusal() -> None:
    """The interpreter itself gives up on it, in one way or another."""
    for source in ("{{ " + "(" * 20000 + ")" * 20000 + " }}", "{% if 1 %}" * 5000 + "{% endif %}" * 5000):
        with pytest.raises(BadRequest, match="The chat template failed"):
            Renderer(ChatTemplate(source), limits=RenderLimits(seconds=5)).render(HELLO)
