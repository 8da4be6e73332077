"""C++ includes and Python imports use only their own layer and the layers below it. The core does not contain Python,
listeners or vendor headers.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path

import mscomm

ROOT = Path(__file__).parent.parent
CSRC, SRC, PACKAGE = ROOT / "csrc", ROOT / "src", ROOT / "python/mscomm"

# Each layer may use itself and the layers before it.
CORE_LAYERS = ("base", "net", "transport", "algo", "cuda", "device", "backend", "comm", "src")
CORE_SEES = {layer: set(CORE_LAYERS[: place + 1]) for place, layer in enumerate(CORE_LAYERS)} | {"tools": {"tools"}}

# The modules and folders of the package, from the lowest layer up. `mscomm` is the package's own __init__.
PYTHON_LAYERS = (
    *(
        "_core",
        "version",
        "errors",
        "environment",
        "interpreter",
        "tracebacks",
        "threads",
        "undisturbed",
        "log",
        "writing",
        "dtype",
    ),
    *("arrays", "registry", "packing", "accelerators", "cluster", "bootstrap", "notices", "context", "exits"),
    *("launching", "completing", "works", "group", "arguments", "job", "subgroups", "collectives", "messages"),
    *("objects", "communication", "tensor", "ops", "dataset", "common", "parallel", "train", "nn", "mscomm", "torch"),
    *("bench", "cli", "__main__", "pyinstaller"),
)

CORE_FILES = sorted(path for folder in (CSRC, SRC) for path in folder.rglob("*") if path.suffix in (".h", ".cc", ".cu"))
PYTHON_FILES = sorted([*PACKAGE.rglob("*.py"), PACKAGE / "__init__.pyi"])


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(path: Path) -> str:
    """Return a C++ file without its comments and strings."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
    return re.sub(r'(?<!#include )"(\\.|[^"\\\n])*"', '""', text)


def core_layer(path: Path) -> str:
    return "src" if path.is_relative_to(SRC) else path.relative_to(CSRC).parts[0]


def module(path: Path) -> str:
    """Return the name of a file's module: mscomm.cluster.hub, or mscomm.cluster for cluster/__init__.py."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path) for path in PYTHON_FILES} | {"mscomm._core"}


def layer(name: str) -> str:
    return name.split(".")[1] if "." in name else "mscomm"


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Return (line, module) for each import from the package, including imports that are only for type checkers."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            imported = name if name in MODULES else name.rpartition(".")[0]
            if imported in MODULES and imported != module(path):
                found.append((node.lineno, imported))
    return found


def test_core_files_include_their_own_and_lower_layers():
    wrong = [
        f"{named(path)}:{number}: {line}"
        for path in CORE_FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := re.match(r'\s*#\s*include\s*"([^/"]+)', line)) and found[1] not in CORE_SEES[core_layer(path)]
    ]
    assert not wrong


def test_python_files_import_only_their_own_and_lower_layers():
    folders = {layer(module(path)) for path in PYTHON_FILES}
    assert folders <= set(PYTHON_LAYERS), "give the new layer a place among PYTHON_LAYERS and in CONTRIBUTING.md"
    place = {name: number for number, name in enumerate(PYTHON_LAYERS)}
    wrong = [
        f"{named(path)}:{line}: {layer(module(path))} must not import {name}"
        for path in PYTHON_FILES
        for line, name in imports(path)
        if place.get(layer(name), len(place)) > place[layer(module(path))]
    ]
    assert not wrong


def test_the_package_names_only_what_is_below_it():
    lower = PYTHON_LAYERS[: PYTHON_LAYERS.index("mscomm")]
    modules = {*mscomm._MODULE_OF.values(), *(f"mscomm.{name}" for name in mscomm._MODULES)}
    assert set(map(layer, modules)) <= set(lower)


def test_no_module_imports_itself_through_others():
    graph = {module(path): {name for _, name in imports(path)} for path in PYTHON_FILES if path.suffix == ".py"}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that shows the cycle


def test_the_core_knows_no_python():
    python = r'#\s*include\s*[<"](Python\.h|pybind11/)|\bPy[A-Z_]\w+\('
    assert [named(path) for path in CORE_FILES if core_layer(path) != "src" and re.search(python, code(path))] == []


def test_the_core_never_listens():
    listens = r"(?<![\w.>:])(::)?(listen|accept4?|bind)\s*\("
    assert [named(path) for path in CORE_FILES if core_layer(path) != "tools" and re.search(listens, code(path))] == []


def test_no_vendor_header_is_included():
    vendors = "cuda|nccl|hccl|acl|mpi|pmi|pmix|numa|openssl|infiniband|rdma|torch|ATen|c10"
    included = re.compile(rf'#\s*include\s*[<"]((?:{vendors})\w*(?:/[^>"]*|\.h\w*))[>"]', re.I)
    found = [(named(path), header) for path in CORE_FILES for header in included.findall(path.read_text())]
    # Headers in csrc/cuda are mscomm's own.
    assert [(path, header) for path, header in found if not (CSRC / header).exists()] == []
