"""Distributions as a PNG (or whatever matplotlib makes of the file's ending). matplotlib is no dependency."""

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
            f"--plot {path}", "matplotlib is not installed", "pip install matplotlib, or read the terminal's histograms"
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
