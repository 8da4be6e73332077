"""Plots what `mscomm bench` measured: call time against message size. A panel shows one collective at one job size.

    python -m mscomm.bench.plot all_reduce-2.json all_reduce-4.json compare.svg

The last argument is the picture to write (.svg, .png or .pdf). The arguments before it are files that `mscomm bench
--json` has written. This needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUFFIXES = (".svg", ".png", ".pdf")
MISSING = "a plot needs matplotlib, which is not in this environment. Run: pip install matplotlib"

# The label, colour and marker of each line. Blue and orange can be told apart with every kind of colour vision.
_LINES = {
    "mscomm, shared": ("mscomm, arrays of mscomm.empty", "#08519c", "o"),
    "mscomm, private": ("mscomm, ordinary NumPy arrays", "#6baed6", "s"),
    "fused": ("mscomm, all_reduce_many", "#08519c", "o"),
    "each": ("mscomm, one all_reduce each", "#6baed6", "s"),
    "torch-mscomm": ("mscomm (torch.distributed)", "#08519c", "o"),
    "torch-gloo": ("gloo (torch.distributed)", "#d95f02", "^"),
    "torch-gloo-4": ("gloo, its interface named four times", "#fdae6b", "^"),
    "openmpi": ("Open MPI", "#7a5195", "v"),
    "openmpi-single": ("Open MPI, MPI_THREAD_SINGLE", "#c3a6d1", "v"),
    "mpich": ("MPICH", "#b8860b", "D"),
    "mpich-single": ("MPICH, MPI_THREAD_SINGLE", "#e0c878", "D"),
    "memory": ("memory (NumPy, no collective)", "#666666", "x"),
}
_GREY = "#666666"
_X_TICKS = 4  # how many labels such as "64 KiB" fit below a panel
_FEW_DECADES = 100.0  # if longest time < this * shortest time, times between powers of ten also get labels

Panel = dict[str, dict[int, float]]  # line -> size -> the time in microseconds


def missing() -> bool:
    return find_spec("matplotlib") is None


def panels_of(documents: list[dict[str, Any]]) -> dict[tuple[str, int], Panel]:
    """Return the times in all files, with one panel per collective and number of ranks. Prefer in-place times."""
    panels: dict[tuple[str, int], Panel] = {}
    for document in documents:
        plan = document["plan"]
        panel = panels.setdefault((plan["collective"], document["environment"]["ranks"]), {})
        for row in document["rows"]:
            for name, modes in row["results"].items():
                line = _line_of(name, plan["shared"])
                cell = modes.get("in_place") or modes["out_of_place"]
                panel.setdefault(line, {})[row["size"]] = cell["us"]
    return panels


def _line_of(name: str, shared: bool) -> str:
    """Return a contender's key in _LINES. `shared`: whether `mscomm bench` had the option --shared."""
    if name == "private" or (name == "mscomm" and not shared):
        return "mscomm, private"
    return "mscomm, shared" if name == "mscomm" else name


def _in_units(value: float, units: tuple[str, ...], step: int) -> str:
    """Return the value with a suitable unit: _in_units(65536, ("B", "KiB"), 1024) is "64 KiB"."""
    for unit in units[:-1]:
        if value < step:
            return f"{value:g} {unit}"
        value /= step
    return f"{value:g} {units[-1]}"


def draw(documents: list[dict[str, Any]], picture: Path) -> None:
    """Draw the documents and write the picture. The same numbers always produce the same file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = panels_of(documents)
    rows = list(dict.fromkeys(collective for collective, _ in panels))
    columns = sorted({ranks for _, ranks in panels})
    figure, axes = plt.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False, layout="constrained")
    figure.set_size_inches(2.6 + 2.6 * len(columns), 1.6 + 2.1 * len(rows))
    handles = {}
    for collective, line in zip(rows, axes, strict=True):
        for ranks, ax in zip(columns, line, strict=True):
            panel = panels.get((collective, ranks), {})
            for name, (label, colour, marker) in _LINES.items():
                if name not in panel:
                    continue
                sizes = sorted(panel[name])
                times = [panel[name][size] for size in sizes]
                (handles[label],) = ax.plot(
                    sizes, times, label=label, color=colour, marker=marker, markersize=3.2, linewidth=1.5
                )
            _style(ax, panels)
            ax.set_title(f"{collective}, {ranks} ranks", fontsize=9.5, loc="left")
    figure.legend(
        handles.values(), handles, loc="outside upper center", ncols=min(3, len(handles)), frameon=False, fontsize=9
    )
    figure.supxlabel("size of the message", fontsize=9, color=_GREY)
    figure.supylabel("time of one call (lower is better)", fontsize=9, color=_GREY)

    picture.parent.mkdir(parents=True, exist_ok=True)
    partial = picture.with_name(f".partial-{picture.name}")
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(picture.suffix)
    with matplotlib.rc_context({"svg.hashsalt": "mscomm"}):
        figure.savefig(partial, dpi=120, metadata=undated)
    plt.close(figure)
    partial.replace(picture)


def _style(ax: Any, panels: dict[tuple[str, int], Panel]) -> None:
    """Style the axes of one panel. Ticks and labels fit the data of all panels, so they are the same in each panel."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    cells = [cell for panel in panels.values() for cell in panel.values()]
    sizes = sorted({size for cell in cells for size in cell})
    times = [us for cell in cells for us in cell.values()]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    # Label about four of the measured sizes, and the times that are powers of ten. If the range of times is small, also
    # label times between powers of ten.
    ax.xaxis.set_major_locator(FixedLocator(sizes[:: max(1, (len(sizes) + 1) // _X_TICKS)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _in_units(value, ("B", "KiB", "MiB", "GiB"), 1024)))
    few = max(times) < _FEW_DECADES * min(times)
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _in_units(value, ("µs", "ms", "s"), 1000)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(which="both", length=0, labelsize=8, labelcolor=_GREY)
    ax.grid(which="major", color="#e4e4e4", linewidth=0.7)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")


def main(words: list[str]) -> None:
    if len(words) < 2 or not words[-1].endswith(SUFFIXES):
        sys.exit(__doc__)
    if missing():
        sys.exit(MISSING)
    draw([json.loads(Path(word).read_text()) for word in words[:-1]], Path(words[-1]))


if __name__ == "__main__":
    main(sys.argv[1:])
