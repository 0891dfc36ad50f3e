"""Distributions and lines as a PNG, or what matplotlib makes of the file's ending. matplotlib is no dependency."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.types.errors import ConfigError

BINS = 40


def check_plot(path: str) -> None:
    """Raise ConfigError where nothing could be drawn to this file, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {path}", "matplotlib is not installed", "pip install matplotlib, or read what is printed"
        )
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}", "its folder does not exist", "make the folder first")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix.lstrip(".") not in known:
        raise ConfigError(f"--plot {path}", "that is no format to draw in", f"end it with one of: {', '.join(known)}")


def draw_plot(path: str, title: str, distributions: Mapping[str, Sequence[float]]) -> None:
    """A histogram of each distribution with its median, 90th and 99th percentile, side by side in one file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from engine_bench.statistics import percentile

    figure = Figure(figsize=(5 * len(distributions), 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    rows = figure.subplots(1, len(distributions), squeeze=False)
    for axes, (label, values) in zip(rows[0], distributions.items(), strict=True):
        axes.set_xlabel(label)
        axes.set_ylabel("count")
        if not values:
            axes.text(0.5, 0.5, "nothing measured", ha="center", transform=axes.transAxes)
            continue
        axes.hist(values, bins=BINS, color="0.6")
        for q, style in ((50, "-"), (90, "--"), (99, ":")):
            value = percentile(values, q)
            axes.axvline(value, linestyle=style, color="C0", label=f"p{q} {value:.1f}")
        axes.legend()
    figure.savefig(path, dpi=120)


def draw_lines(
    path: str, title: str, across: str, up: str, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
) -> None:
    """Lines in panels, side by side in one file.

    Args:
        across, up: what the axes show; 1 is marked on the upright one.
        panels: by their titles: each line's (x, y), by its name, in the order of x.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    for axes, (name, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.axhline(1.0, color="0.6", linestyle=":")
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
        if lines:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
