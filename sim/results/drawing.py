"""A figure that shows itself in a notebook, and as SVG in a page. Imports matplotlib: import it where one is drawn."""

import io

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.text import Text


class Drawing(Figure):
    """A figure of matplotlib; what a notebook shows of it is SVG, whatever the backend."""

    def _repr_svg_(self) -> str:
        return svg_of(self)


def svg_of(figure: Figure) -> str:
    """Return a figure as SVG, its text as text; matplotlib escapes what stands in it."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    written = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    return svg[svg.index("<svg") :]
