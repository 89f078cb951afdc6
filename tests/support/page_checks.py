"""Accessibility checks of a page: axe, names for controls, contrast for texts, no layout shifts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

# A desktop's and a phone's.
WIDTHS = (1440, 390)

# What a screen reader must be able to call something.
_NAMED = {
    "button",
    "checkbox",
    "combobox",
    "dialog",
    "link",
    "radio",
    "radiogroup",
    "region",
    "slider",
    "spinbutton",
    "tab",
    "table",
    "tablist",
    "tabpanel",
    "textbox",
}

WATCH_SHIFTS = """
  window.shifts = [];
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
      if (!entry.hadRecentInput) {
        const rect = ({ x, y, width, height }) => [x, y, width, height].map(Math.round).join(" ");
        const told = ({ node, previousRect, currentRect }) =>
          `${node?.id || node?.className || node?.nodeName}: ${rect(previousRect)} -> ${rect(currentRect)}`;
        window.shifts.push({ value: entry.value, nodes: [...entry.sources].map(told) });
      }
    }
  }).observe({ type: "layout-shift", buffered: true });
"""

# A colour of any notation as the screen would show it, and what lies below it, layer by layer.
_CONTRASTS = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const painted = (layers) => {
    pen.clearRect(0, 0, 1, 1);
    for (const layer of layers) {
      pen.fillStyle = layer;
      pen.fillRect(0, 0, 1, 1);
    }
    return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !node.checkVisibility() || node.closest(":disabled, .unseen")) continue;
    const style = getComputedStyle(node);
    const below = ["white"];
    for (let each = node; each; each = each.parentElement) {
      below.splice(1, 0, getComputedStyle(each).backgroundColor);
    }
    const [one, other] = [painted([...below, style.color]), painted(below)].map(luminance).sort((a, b) => b - a);
    found.push({
      text: text.slice(0, 40),
      ratio: (one + 0.05) / (other + 0.05),
      large: parseFloat(style.fontSize) >= 24,
    });
  }
  return found;
}"""


def nameless(page: Page) -> list[str]:
    """Roles of visible controls without a name."""
    session = page.context.new_cdp_session(page)
    nodes: list[dict[str, Any]] = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    seen = [node for node in nodes if not node["ignored"] and node["role"]["value"].lower() in _NAMED]
    assert seen
    return [node["role"]["value"] for node in seen if not node.get("name", {}).get("value", "").strip()]


def too_faint(page: Page) -> list[str]:
    """Texts whose contrast is below what WCAG asks of its level AA, with their ratios."""
    found: list[dict[str, Any]] = page.evaluate(_CONTRASTS)
    assert found
    return [f"{each['text']}: {each['ratio']:.2f}" for each in found if each["ratio"] < (3 if each["large"] else 4.5)]


def violations(page: Page) -> list[str]:
    """The rules of axe that the page violates at its present size, with what violates them."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install -e '.[dev]'")
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {', '.join(str(node['target']) for node in each['nodes'])}" for each in found]


def flaws(page: Page) -> list[str]:
    """Violations of axe's rules on a desktop and on a phone, controls without a name, and texts of too little contrast
    in the light or dark theme.
    """
    found = [f"a {role} without a name" for role in nameless(page)]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found += [f"{scheme}: {each}" for each in too_faint(page)]
    before = page.viewport_size
    assert before is not None
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": before["height"]})
        found += [f"{width} pixels: {each}" for each in violations(page)]
    page.set_viewport_size(before)
    return found


def shifted(page: Page) -> tuple[float, list[object]]:
    """How much of the page has moved by itself, and what; needs WATCH_SHIFTS as an init script."""
    shifts: list[dict[str, Any]] = page.evaluate("window.shifts")
    return sum(each["value"] for each in shifts), [each["nodes"] for each in shifts]


def forget_shifts(page: Page) -> None:
    """A browser leaves out what moves within half a second of a click; on a busy machine that is not long enough."""
    page.evaluate("window.shifts.length = 0")


def is_wider_than_the_screen(page: Page) -> bool:
    return bool(page.evaluate("document.scrollingElement.scrollWidth > innerWidth"))
