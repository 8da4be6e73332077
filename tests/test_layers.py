"""Which layer may use which, by includes in C++ and by imports in Python; and what the core must not contain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC, SRC, PACKAGE = ROOT / "csrc", ROOT / "src", ROOT / "python/mscomm"

# Each layer may use itself and the layers before it.
CORE_LAYERS = ("base", "net", "transport", "algo", "cuda", "device", "backend", "comm", "src")
CORE_SEES = {layer: set(CORE_LAYERS[: place + 1]) for place, layer in enumerate(CORE_LAYERS)} | {"tools": {"tools"}}

BELOW = {"errors", "environment", "log", "tracebacks", "_core"}
PYTHON_SEES = {
    "errors": set(),
    "tracebacks": {"errors"},
    "environment": set(),
    "log": {"environment"},
    "notices": BELOW | {"bootstrap"},
    "context": {"errors", "notices"},
    "dtype": set(),
    "common": {"dtype"},
    "arrays": BELOW,
    "accelerators": BELOW,
    "cluster": BELOW | {"accelerators"},
    "bootstrap": BELOW | {"cluster"},
    "group": BELOW | {"arrays", "cluster"},
    "groups": BELOW | {"accelerators", "arrays", "cluster", "bootstrap", "context", "group", "notices"},
    "arguments": BELOW | {"arrays", "group"},
    "collectives": BELOW | {"arguments", "arrays", "group", "groups"},
    "messages": BELOW | {"arrays", "group", "groups"},
}
PYTHON_SEES["registry"] = {"arrays"}
PYTHON_SEES["packing"] = BELOW | {"registry"}
# The layers that are built on the public functions.
UPPER = BELOW | {"arguments", "arrays", "group", "groups", "collectives", "messages", "context", "notices"}
PYTHON_SEES |= {
    layer: UPPER | {"train", "dataset"} for layer in ("train", "dataset", "objects", "ops", "communication")
}
PYTHON_SEES["launching"] = BELOW | {"cli", "cluster"}  # the launcher of `mscomm run`, for a function
PYTHON_SEES["train"] |= {"objects", "bootstrap"}  # what the launcher says about a process that has not joined
PYTHON_SEES["objects"] |= {"packing", "registry"}
PYTHON_SEES["ops"].add("communication")  # the name of the group of all ranks
PYTHON_SEES["dataset"] |= {"dtype", "objects"}  # the ranks compare what they have read

CORE_FILES = sorted(path for folder in (CSRC, SRC) for path in folder.rglob("*") if path.suffix in (".h", ".cc", ".cu"))
PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(path: Path) -> str:
    """A C++ file without its comments and strings."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
    return re.sub(r'(?<!#include )"(\\.|[^"\\\n])*"', '""', text)


def core_layer(path: Path) -> str:
    return "src" if path.is_relative_to(SRC) else path.relative_to(CSRC).parts[0]


def python_layer(path: Path) -> str:
    """errors, cluster, ...; the package's own __init__ is "mscomm"; __main__ and bench are the command line."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return {"__init__": "mscomm", "__main__": "cli", "bench": "cli"}.get(first, first)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, layer) of each import from the package; "mscomm" is the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            whole = f"{node.module}"
            names = [f"{whole}.{alias.name}" for alias in node.names] if whole == "mscomm" else [whole]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "mscomm":
                yield node.lineno, rest.partition(".")[0] or "mscomm"


@pytest.mark.parametrize("path", CORE_FILES, ids=named)
def test_core_files_include_their_own_and_lower_layers(path):
    wrong = [
        f"{named(path)}:{number}: {line}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := re.match(r'\s*#\s*include\s*"([^/"]+)', line)) and found[1] not in CORE_SEES[core_layer(path)]
    ]
    assert not wrong


@pytest.mark.parametrize("path", PYTHON_FILES, ids=named)
def test_python_files_import_only_what_their_layer_may_see(path):
    layer = python_layer(path)
    found = list(imports(ast.parse(path.read_text())))
    if layer == "cli":  # may use all layers
        return
    if layer == "mscomm":  # re-exports all layers except the command line
        wrong = [(line, other) for line, other in found if other == "cli"]
    else:
        assert layer in PYTHON_SEES, f"the design has no layer {layer}; give it a row here and in the design"
        wrong = [(line, other) for line, other in found if other not in PYTHON_SEES[layer] | {layer, "mscomm"}]
    assert not wrong, f"{named(path)}: {layer} must not import {wrong}"


@pytest.mark.parametrize("path", [path for path in PYTHON_FILES if python_layer(path) in PYTHON_SEES], ids=named)
def test_python_files_take_nothing_but_the_version_from_the_package_itself(path):
    # mscomm.anything would import any layer at its first use, and the test above would not notice.
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mscomm"
    }
    assert used <= {"__version__"}


@pytest.mark.parametrize("path", [path for path in CORE_FILES if core_layer(path) != "src"], ids=named)
def test_the_core_knows_no_python(path):
    assert not re.search(r'#\s*include\s*[<"](Python\.h|pybind11/)|\bPy[A-Z_]\w+\(', code(path))


@pytest.mark.parametrize("path", [path for path in CORE_FILES if core_layer(path) != "tools"], ids=named)
def test_the_core_never_listens(path):
    assert not re.search(r"(?<![\w.>:])(::)?(listen|accept4?|bind)\s*\(", code(path))


@pytest.mark.parametrize("path", CORE_FILES, ids=named)
def test_no_vendor_header_is_included(path):
    vendors = "cuda|nccl|hccl|acl|mpi|pmi|pmix|numa|openssl|infiniband|rdma|torch|ATen|c10"
    found = re.findall(rf'#\s*include\s*[<"]((?:{vendors})\w*(?:/[^>"]*|\.h\w*))[>"]', path.read_text(), re.I)
    assert [header for header in found if not (CSRC / header).exists()] == []  # csrc/cuda is ours
