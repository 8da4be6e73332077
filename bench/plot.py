"""A picture of what bench/compare.py measured: time of a call over message size, by collective and number of ranks.

    python bench/plot.py compare-2.json compare-4.json compare-8.json docs/images/compare.svg

Takes the files that compare.py wrote with --json, one for each number of ranks, and last the picture to write (.svg,
.png or .pdf). Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

COLLECTIVES = ("all_reduce", "all_gather", "broadcast")
# The name in the file: label, colour, marker. Blue and orange differ for every kind of colour vision.
LINES = {
    "arena": ("mscomm, arrays of mscomm.empty", "#08519c", "o"),
    "private": ("mscomm, ordinary NumPy arrays", "#6baed6", "s"),
    "gloo": ("gloo (torch.distributed)", "#d95f02", "^"),
}
SIZE_TICKS = (8, 1 << 10, 64 << 10, 1 << 20, 64 << 20)
GREY = "#666666"

Cell = dict[str, Any]


def read(paths: list[Path]) -> dict[tuple[str, int], list[Cell]]:
    """The cells of all files by collective and number of ranks, in order of size."""
    panels: dict[tuple[str, int], list[Cell]] = {}
    for path in paths:
        for cell in json.loads(path.read_text()):
            panels.setdefault((cell["collective"], cell["ranks"]), []).append(cell)
    for cells in panels.values():
        cells.sort(key=lambda cell: cell["bytes"])
    return panels


def in_units(value: float, units: tuple[str, ...], step: int) -> str:
    """in_units(65536, ("B", "KiB"), 1024) is "64 KiB"."""
    for unit in units[:-1]:
        if value < step:
            return f"{value:g} {unit}"
        value /= step
    return f"{value:g} {units[-1]}"


def draw(ax: Axes, cells: list[Cell]) -> None:
    """One panel."""
    sizes = [cell["bytes"] for cell in cells]
    for name, (label, colour, marker) in LINES.items():
        times = [cell["us"][name] for cell in cells]
        ax.plot(sizes, times, label=label, color=colour, marker=marker, markersize=3.2, linewidth=1.5)


def style(ax: Axes) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(FixedLocator(SIZE_TICKS))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_units(value, ("B", "KiB", "MiB"), 1024)))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_units(value, ("µs", "ms", "s"), 1000)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(which="both", length=0, labelsize=8, labelcolor=GREY)
    ax.grid(which="major", color="#e4e4e4", linewidth=0.7)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", type=Path, help="what compare.py wrote with --json")
    parser.add_argument("picture", type=Path, help="the file to write")
    options = parser.parse_args()

    panels = read(options.json)
    rows = [what for what in COLLECTIVES if any(what == collective for collective, _ in panels)]
    columns = sorted({ranks for _, ranks in panels})
    if not rows:
        raise SystemExit("plot.py: the files have no cells of " + ", ".join(COLLECTIVES))

    figure, axes = plt.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False, layout="constrained")
    figure.set_size_inches(2 + 2.6 * len(columns), 1.2 + 2.1 * len(rows))
    for what, line in zip(rows, axes, strict=True):
        for ranks, ax in zip(columns, line, strict=True):
            draw(ax, panels.get((what, ranks), []))
            style(ax)
            ax.set_title(f"{what}, {ranks} ranks", fontsize=9.5, loc="left")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(LINES), frameon=False, fontsize=9.5)
    figure.supxlabel("size of one rank's array", fontsize=9, color=GREY)
    figure.supylabel("time of one call (lower is better)", fontsize=9, color=GREY)

    options.picture.parent.mkdir(parents=True, exist_ok=True)
    # No date and no random ids in it: the same numbers make the same file.
    matplotlib.rcParams["svg.hashsalt"] = "mscomm"
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(options.picture.suffix)
    figure.savefig(options.picture, dpi=120, metadata=undated)


if __name__ == "__main__":
    main()
