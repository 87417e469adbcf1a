"""A figure that shows itself in a notebook, and as SVG in a page. Imports matplotlib: import it where one is drawn."""

import io
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


class Drawing(Figure):
    """A figure of matplotlib; what a notebook shows of it is SVG, whatever the backend."""

    def _repr_svg_(self) -> str:
        return svg_of(self)


def svg_of(figure: Figure) -> str:
    """Return a figure as SVG with its text as text; a browser shows the value of a point or bar under the pointer."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    values, written = _values(figure), io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(written.getvalue())
    for group in list(root.iter(f"{{{SVG}}}g")):
        texts = values.get(group.get("id", ""), [])
        shapes = list(group.iter(f"{{{SVG}}}use")) or list(group.iter(f"{{{SVG}}}path"))
        seen = len(shapes) == len(texts)  # else some points lie outside the axes
        for shape, said in zip(shapes, texts, strict=True) if seen else ():
            ElementTree.SubElement(shape, f"{{{SVG}}}title").text = said
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _values(figure: Figure) -> dict[str, list[str]]:
    """Give an id to each series of points, and to each bar; return by id what there is to say of each point of it."""
    found: dict[str, list[str]] = {}
    for axes in figure.axes:
        for line in axes.get_lines():
            if not str(line.get_label()).startswith("_"):
                points = np.asarray(line.get_xydata(), np.float64).tolist()
                line.set_gid(f"values-{len(found)}")
                name = " ".join(str(line.get_label()).split())
                found[f"values-{len(found)}"] = [f"{name}: {y:.3g} at {x:.3g}" for x, y in points]
        for bars in axes.containers:
            for bar in bars if isinstance(bars, BarContainer) else ():
                if bar.get_width():
                    bar.set_gid(f"values-{len(found)}")
                    found[f"values-{len(found)}"] = [f"{bars.get_label()}: {bar.get_width():.3g}"]
    return found
