"""Shows what the model of csrc/algo/cost.h says for up to 4096 hosts, beside what was measured on a few.

    mscomm bench tune -b 8 -e 1M -f 8 --json four.json    # on 2, 3, 4 ... hosts of one rank each
    python bench/scaling.py two.json four.json --plot docs/images/scaling.svg

The prices are those of the file with the most ranks. Prints the tables of docs/scaling.md, in microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mscomm import _core
from mscomm.cluster.prices import Prices

MODELLED = [2**power for power in range(1, 13)]
TABLE = (8, 32, 128, 1024, 4096)
# Each collective with the sizes of x for which the picture has a line.
SIZES = {"all_reduce": (8, 32 << 10, 1 << 20), "all_gather": (8, 4 << 10, 256 << 10)}


def modelled_us(prices: Prices, collective: str, size: int, ranks: int) -> tuple[float, str]:
    """Return the time of a call on `ranks` hosts by the model, and the algorithm that init would choose."""
    layout = _core.Layout(hosts=list(range(ranks)), rank=0, forced=[""] * len(_core.collectives), prices=list(prices))
    what = list(_core.collectives).index(collective)
    chosen = layout.chosen(what, size)
    cost = layout.cost(what, chosen, size)
    assert cost is not None
    return prices.us(cost), chosen


def measured(documents: list[dict[str, Any]], collective: str, size: int) -> dict[int, tuple[int, float]]:
    """Return for each number of ranks the measured size of x that is nearest, and the time of the best algorithm."""
    found = {}
    for document in documents:
        rows = [row for row in document["rows"] if row["collective"] == collective]
        row = min(rows, key=lambda row: abs(math.log((row["message"] or 1) / size)))
        (cell,) = row["results"][row["best"]].values()
        found[document["environment"]["ranks"]] = (row["message"], cell["us"])
    return found


def _lines() -> Iterator[tuple[str, int]]:
    return ((collective, size) for collective, sizes in SIZES.items() for size in sizes)


def label(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def draw(prices: Prices, documents: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "mscomm"  # the same picture has the same bytes
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(SIZES), figsize=(9, 3.6), sharey=True)
    for panel, (collective, sizes) in zip(panels, SIZES.items(), strict=True):
        for size, colour in zip(sizes, ("#6baed6", "#08519c", "#d95f02"), strict=True):
            times = [modelled_us(prices, collective, size, ranks)[0] for ranks in MODELLED]
            panel.plot(MODELLED, times, "--", color=colour, label=f"{label(size)}, model")
            found = measured(documents, collective, size)
            times = [us for _, us in found.values()]
            panel.plot(list(found), times, "o", color=colour, label=f"about {label(size)}, measured")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(collective, fontsize=10)
        panel.set_xlabel("hosts of one rank each")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, frameon=False)
    panels[0].set_ylabel("time of a call (us)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--plot", type=click.Path(path_type=Path), help="The picture to write.")
def main(files: tuple[Path, ...], plot: Path | None) -> None:
    documents = sorted((json.loads(file.read_text()) for file in files), key=lambda one: one["environment"]["ranks"])
    if "prices" not in documents[-1]:
        raise click.ClickException(
            f"the file with the most ranks ({documents[-1]['environment']['ranks']}) has no prices"
        )
    prices = Prices(**documents[-1]["prices"])
    print("Prices: " + ", ".join(f"{name} {price:.3g}" for name, price in prices._asdict().items()))
    hosts = [document["environment"]["ranks"] for document in documents]
    print("\n| | x |" + "".join(f" {n} hosts: measured, model |" for n in hosts) + "\n|---|---|" + "---|" * len(hosts))
    for collective, size in _lines():
        # The modelled time is that of the size which was measured.
        cells = [
            f" {us:.0f}, {modelled_us(prices, collective, x, n)[0]:.0f} |"
            for n, (x, us) in measured(documents, collective, size).items()
        ]
        print(f"| {collective} | {label(size)} |{''.join(cells)}")
    print("\n| | x |" + "".join(f" {n} hosts |" for n in TABLE) + "\n|---|---|" + "---|" * len(TABLE))
    for collective, size in _lines():
        modelled = (modelled_us(prices, collective, size, n) for n in TABLE)
        print(f"| {collective} | {label(size)} |" + "".join(f" {us:.0f} {chosen} |" for us, chosen in modelled))
    if plot:
        draw(prices, documents, plot)


if __name__ == "__main__":
    main()
