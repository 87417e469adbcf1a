"""What a page is made of: sections of texts, lists, commands, tables and figures (SVG)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Item:
    """Something on the page: a text, a figure with its caption, a table or a list of commands."""

    kind: str
    text: str = ""
    svg: Markup | None = None
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    content: tuple[Item, ...]


def figure_item(figure: "Figure", caption: str) -> Item:
    from sim.results.drawing import svg_of

    return Item("figure", caption, Markup(svg_of(figure)))
