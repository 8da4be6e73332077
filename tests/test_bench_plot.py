"""The plots that mscomm bench draws."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benches import matplotlib

from mscomm.bench import peers, plot


def document(collective: str, ranks: int, shared: bool, **times: float) -> dict[str, Any]:
    rows = [
        {"size": size, "results": {name: {"in_place": {"us": us * size}} for name, us in times.items()}}
        for size in (8, 64)
    ]
    return {"plan": {"collective": collective, "shared": shared}, "environment": {"ranks": ranks}, "rows": rows}


def test_files_with_the_same_collective_and_ranks_share_a_panel() -> None:
    panels = plot.panels_of(
        [document("broadcast", 4, False, mscomm=1.0, mpich=2.0), document("broadcast", 4, True, mscomm=0.5)]
    )
    assert panels == {
        ("broadcast", 4): {
            "mscomm, private": {8: 8.0, 64: 64.0},
            "mpich": {8: 16.0, 64: 128.0},
            "mscomm, shared": {8: 4.0, 64: 32.0},
        }
    }


def test_every_contender_has_a_line() -> None:
    for shared in (True, False):
        times = dict.fromkeys(("mscomm", *peers.PEERS), 1.0)
        ((_, panel),) = plot.panels_of([document("all_reduce", 2, shared, **times)]).items()
        assert set(panel) <= set(plot._LINES)


@matplotlib
def test_the_same_numbers_make_the_same_picture(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document("all_reduce", 2, False, mscomm=1.0)))
        words = [sys.executable, "-m", "mscomm.bench.plot", tmp_path / f"{name}.json", tmp_path / f"{name}.svg"]
        subprocess.run(words, check=True, timeout=120)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.svg", "b.json", "b.svg"]


@matplotlib
@pytest.mark.parametrize("sizes", [(8, 32, 128), (1 << 20,), tuple(8 * 4**i for i in range(13))])
def test_the_sizes_and_times_of_a_plot_can_be_read_off(sizes: tuple[int, ...]) -> None:
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    times = [1.3 + size / 2000 for size in sizes]
    ax.plot(sizes, times)
    plot._style(ax, {("all_reduce", 2): {"mscomm": dict(zip(sizes, times, strict=True))}})
    shown = [value for value in ax.get_xticks() if ax.get_xlim()[0] <= value <= ax.get_xlim()[1]]
    assert set(shown) <= set(sizes) and min(3, len(sizes)) <= len(shown) <= 6
    low, high = ax.get_ylim()
    assert sum(low <= value <= high for value in (*ax.get_yticks(), *ax.get_yticks(minor=True))) >= 1
