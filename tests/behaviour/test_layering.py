"""Calls go down, never up."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "preact_kernels"
# Higher layers may import lower ones. Modules outside the layers may import all of them.
LAYERS = {
    "torch_compat": -2,
    **dict.fromkeys(("activations", "attributes", "call_stack"), -1),
    "kernels": 0,
    **dict.fromkeys(("norms", "ops"), 1),
    "modules": 2,
    "models": 3,
    **dict.fromkeys(("conversion", "graphs", "memory", "planning"), 4),
}
# Modules that several backends import.
SHARED = ("contract", "dropout", "layout", "libraries", "native", "pytorch_conv", "running_stats")
FILES = sorted(PACKAGE.rglob("*.py"))


def layer(parts):
    """The layer of a module, given its names after `preact_kernels`."""
    return LAYERS.get(parts[0], len(LAYERS)) if parts else len(LAYERS) + 1


def names_of(path):
    """The names of the module of a file after `preact_kernels`."""
    return path.relative_to(PACKAGE).with_suffix("").parts


def imports(path, folder="preact_kernels"):
    """Modules of a top-level folder that a file imports, as names after the name of the folder."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package == folder:
                yield parts


def test_no_file_imports_from_above():
    assert {names_of(path)[0] for path in FILES} >= LAYERS.keys()
    above = []
    for path in FILES:
        own = layer([] if path == PACKAGE / "__init__.py" else names_of(path))
        above += [(path.name, ".".join(p)) for p in imports(path) if layer(p) > own]
    assert not above


def test_no_backend_imports_another():
    others = []
    for path in sorted((PACKAGE / "kernels").rglob("*.py")):
        allowed = [[names_of(path)[1]], *([name] for name in SHARED)]
        found = [p for p in imports(path) if p[0] == "kernels" and p[1:2] not in allowed]
        others += [(path.name, ".".join(p)) for p in found]
    assert not others


def test_backends_do_not_import_themselves_and_ops_do_not_import_what_backends_share():
    own = [
        path.name
        for path in sorted((PACKAGE / "kernels").rglob("*.py"))
        if ["kernels", names_of(path)[1]] in imports(path)
    ]
    shared = [
        path.name
        for path in sorted((PACKAGE / "ops").glob("*.py"))
        if any(p[:2] == ["kernels", "pytorch_conv"] for p in imports(path))
    ]
    assert not own + shared


def test_benchmarks_and_tests_do_not_import_each_other():
    """What both use is in `testbed`, which imports neither. Tests of `bench` are in tests/bench."""
    above = {"bench": ["tests"], "testbed": ["bench", "tests"], "tests": ["bench"]}
    above["preact_kernels"] = ["bench", "testbed", "tests"]
    found = [
        (path.name, ".".join((other, *names)))
        for folder, others in above.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        for other in others
        for names in imports(path, other)
        if ROOT / "tests" / "bench" not in path.parents
    ]
    assert not found


def test_one_file_finds_frames_of_the_call_stack():
    """`Region` asks whether the frame that entered it has returned, `liveness` what frames hold."""
    names, found = ("_getframe", "currentframe", "f_back", "f_locals", "f_code"), set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "name", None)
            if name in names:  # as an attribute, or imported by name
                found.add((path.name, name))
    own = {("call_stack.py", name) for name in names if name != "currentframe"}
    others = {("region.py", "f_back"), ("liveness.py", "f_locals"), ("liveness.py", "f_code")}
    assert found == own | others
