"""What a page is made of: sections of texts, lists, commands, tables and figures (SVG)."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Shown = tuple[str, float | None]
"""A cell of a table: what is shown, and what it sorts by."""


@dataclass(frozen=True)
class Item:
    """Something on the page: a text, a figure with its caption, a table or a list of commands."""

    kind: str
    text: str = ""
    svg: Markup | None = None
    head: tuple[str, ...] = ()
    rows: tuple[tuple[Shown, ...], ...] = ()


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    content: tuple[Item, ...]


def figure_item(figure: "Figure", caption: str) -> Item:
    return Item("figure", caption, svg_of(figure))


def svg_of(figure: "Figure") -> Markup:
    """Return a figure as SVG for a page, its text as text; matplotlib escapes what stands in it."""
    import matplotlib as mpl
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    return Markup(svg[svg.index("<svg") :])
