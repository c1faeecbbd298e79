"""Executes notebooks. `make notebook` runs this module to refresh the outputs in examples/."""

import hashlib
import re
from pathlib import Path

import nbclient
import nbformat
from traitlets.config import Config

ROOT = Path(__file__).parents[2]
IDENTITY_MAPPINGS = ROOT / "examples" / "identity_mappings.ipynb"


def read(path):
    """Returns a notebook."""
    return nbformat.read(path, as_version=4)


def code_checksum(notebook):
    """Returns the SHA-256 sum of all code cells."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def set_parameters(notebook, **values):
    """Assigns other values in the cell with the tag `parameters`."""
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    for name, value in values.items():
        cell.source, count = re.subn(
            rf"^{name} = \S+", f"{name} = {value}", cell.source, flags=re.M
        )
        if count != 1:
            raise ValueError(f"expected one assignment of {name}, got:\n{cell.source}")


def execute(notebook):
    """Executes all cells in another process and keeps their outputs; raises on an error."""
    client = nbclient.NotebookClient(
        notebook,
        config=Config({"KernelManager": {"transport": "ipc"}}),  # opens no port
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(ROOT)}},
        timeout=None,
    )
    client.execute()


def main():
    """Executes the notebook in examples/ and writes it, with a checksum of what was executed."""
    notebook = read(IDENTITY_MAPPINGS)
    execute(notebook)
    notebook.metadata = {
        "code_sha256": code_checksum(notebook),
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, IDENTITY_MAPPINGS)


if __name__ == "__main__":
    main()
