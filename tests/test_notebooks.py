"""Every notebook runs from top to bottom on what ships with the project, and is committed with what it shows."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.test_plain_words import found as retired

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
QUICK = ("1_", "9_")
LARGEST = 300_000


def _figures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/svg+xml" in output.get("data", {}) for output in outputs)


def _texts(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the texts and tables that it shows, without warnings, which name files of the kernel."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output["data"].get("text/plain", "") for output in outputs if "data" in output]
    return shown + [output["text"] for output in outputs if output.get("name") == "stdout"]


def test_the_questions_are_all_there():
    assert [path.stem.split("_")[0] for path in NOTEBOOKS] == list("123456789")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_question_with_its_outputs_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    title = notebook.cells[0].source.splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?") or path.stem.startswith("9_")
    assert all(cell.execution_count == i for i, cell in enumerate(cells, 1)), "run it from top to bottom"
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert _figures(notebook)
    assert path.stat().st_size <= LARGEST


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_answer_states_no_figure_and_no_retired_word(path):
    """Figures of a run are printed by the cell that computes them, as they differ with the trace."""
    texts = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    assert not [word for text in texts for word in retired(text)]
    answers = [
        part for text in texts for part in text.split("\n\n") if part.startswith(("**Answer.**", "**What next.**"))
    ]
    assert len(answers) == 1
    assert not re.search(r"\d+(\.\d+)?(%| ms\b)", answers[0])


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem.startswith(QUICK) else pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_from_top_to_bottom_and_shows_the_same_again(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    shown = _figures(notebook), _texts(notebook)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (_figures(notebook), _texts(notebook)) == shown


@pytest.mark.parametrize(("requests", "shown"), [("4", (1, 1)), ("1", None)])
def test_the_shift_fits_a_trace_of_few_requests(requests, shown, monkeypatch):
    monkeypatch.setenv("MOE_REQUESTS", requests)
    notebook = nbformat.read(next(path for path in NOTEBOOKS if path.stem.startswith("4_")), as_version=4)
    names: dict[str, object] = {}
    options, groups, shift = [cell.source for cell in notebook.cells if cell.cell_type == "code"][:3]
    exec(f"{options}\nPOLICIES = ['lru']\n{groups}", names)
    if shown is None:
        with pytest.raises(ValueError, match="1 requests are too few for a shift"):
            exec(shift, names)
    else:
        exec(shift, names)
        assert (names["WARMUP"], names["AFTER"]) == shown
