"""The routing of a trace on the page: its EAMs, and how alike those of its requests are."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from sim.quantities import show_share
from sim.report.elements import Item, figure_item
from sim.report.inputs import Results
from sim.results import plot
from traces.steps import DECODE, PREFILL

MAPPED = 5
"""Requests whose EAMs are drawn, beside that of all."""

COMPARED = 200
"""Requests in the map of similarities at most; more are thinned out evenly."""


def items(sweep: Results) -> Iterator[Item]:
    trace = sweep.trace
    if trace is None:
        yield Item("text", "The trace is not there, so its routing is not drawn.")
        return
    eams = trace.eams(DECODE)
    phase = "decoded tokens"
    if not eams.sum():
        eams, phase = trace.eams(PREFILL), "prompts"
    routed = np.flatnonzero(eams.any(axis=(1, 2)))
    if not len(routed):
        yield Item("text", "Nothing was routed.")
        return
    eams, requests = eams[routed], trace.requests.iloc[routed]
    names = requests["id"].astype(str).tolist()
    whole = eams.sum(axis=0)
    places = np.linspace(0, len(names) - 1, min(MAPPED, len(names))).round().astype(int)
    maps = {"all requests": plot.shares(whole)} | {
        names[i] if len(names[i]) <= 24 else f"{names[i][:21]}...": plot.shares(eams[i])
        for i in dict.fromkeys(places.tolist())
    }
    caption = (
        f"Expert activation matrices of {phase}: how much of a layer's routing each expert has. The mean request uses "
        f"{show_share(float((eams > 0).mean()))} of all experts, all requests together use "
        f"{show_share(float((whole > 0).mean()))}."
    )
    yield figure_item(plot.heat_maps(maps, "share of the layer's tokens"), caption)
    if len(names) < 2:
        yield Item("text", "There is one request only: nothing to compare it with.")
        return
    yield from _similarity(requests, eams)


def _similarity(requests: pd.DataFrame, eams: Any) -> Iterator[Item]:
    labels = (requests["dataset"].astype(str) + " / " + requests["task"].astype(str)).to_numpy()
    kept = np.unique(np.linspace(0, len(labels) - 1, min(COMPARED, len(labels))).round().astype(int))
    order = kept[np.argsort(labels[kept], kind="stable")]
    flat = eams[order].reshape(len(order), -1).astype(np.float64)
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    cosines = flat @ flat.T
    tasks = set(labels[order]) - {" / "}  # which is no label
    title = f"{len(order)} requests{f', ordered by task ({len(tasks)})' if tasks else ''}"
    caption = "How alike requests are: bright blocks along the diagonal are tasks whose requests use the same experts."
    yield figure_item(plot.similarity_map(cosines, title), caption)
