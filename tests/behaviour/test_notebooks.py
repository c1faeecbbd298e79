"""Notebooks run, and the outputs in the repository are those of their code."""

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("nbclient")
pytest.importorskip("sklearn")
pytest.importorskip("tensorboard")

import matplotlib
from IPython import display
from matplotlib import pyplot as plt

from tests.behaviour import notebooks

COMMITTED = notebooks.read(notebooks.IDENTITY_MAPPINGS)
REFRESH = "run `make notebook`"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def displayed(notebook):
    """What each code cell displays: the text of a table, or None for a figure."""
    return [
        [output.data.get("text/markdown") for output in cell.outputs if "data" in output]
        for cell in code_cells(notebook)
    ]


def column(cells, title):
    """Maps the first column of a displayed table to another."""
    (table,) = [text for outputs in cells for text in outputs if text and title in text]
    names, _, *rows = [
        [value.strip() for value in line.strip("|").split("|")] for line in table.splitlines()
    ]
    return {row[0]: row[names.index(title)] for row in rows}


def kinds(cells):
    """Whether each output is a figure."""
    return [[text is None for text in outputs] for outputs in cells]


def test_outputs_are_those_of_the_code():
    cells = code_cells(COMMITTED)
    assert COMMITTED.metadata.get("code_sha256") == notebooks.code_checksum(COMMITTED), REFRESH
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), REFRESH
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type == "display_data", REFRESH  # no error, no warning
    assert not any("execution" in cell.metadata for cell in cells), REFRESH  # times
    assert notebooks.IDENTITY_MAPPINGS.stat().st_size < 400_000


def test_the_code_runs_with_small_networks_in_this_process(monkeypatch):
    notebook = notebooks.read(notebooks.IDENTITY_MAPPINGS)
    notebooks.set_parameters(notebook, DEPTH=8, EPOCHS=1, IMAGE_SIZE=8)
    matplotlib.use("agg")
    monkeypatch.setattr(display, "display", lambda table: found[-1].append(table.data))
    monkeypatch.setattr(plt, "show", lambda: found[-1].append(None))
    names, found = {}, []
    for cell in code_cells(notebook):
        found.append([])
        exec(cell.source, names)
    plt.close("all")
    assert kinds(found) == kinds(displayed(COMMITTED))
    identities = column(found, "blocks that are the identity")
    assert identities.pop("full-preactivation") == "1 of 1"
    assert set(identities.values()) == {"0 of 1"}


@pytest.mark.slow
def test_the_notebook_shows_what_its_text_says():
    notebook = notebooks.read(notebooks.IDENTITY_MAPPINGS)
    notebooks.execute(notebook)
    cells = displayed(notebook)
    assert kinds(cells) == kinds(displayed(COMMITTED))
    gradients = {k: float(v) for k, v in column(cells, "with branches").items()}
    assert min(gradients, key=gradients.get) == "identity" and gradients["identity"] < 1e4
    errors = {k: float(v) for k, v in column(cells, "test error, %").items()}
    assert errors["full-preactivation"] < 10 and errors["original"] > 30
