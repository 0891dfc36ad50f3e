"""What a run achieved, beside what the machine can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_bench.probe import Machine, probe_figures, warnings

if TYPE_CHECKING:
    from engine_bench.counting import Work
    from engine_bench.report import Report


def add_machine(report: Report, before: Machine, after: Machine) -> None:
    """The probes as figures, and what they warn of."""
    report.figures |= probe_figures(before, after)
    report.warnings += warnings(before, after)
    report.row(
        "this machine",
        f"{before.read_gb_s:.1f} GB/s, {before.gflop_s:.1f} GFLOP/s before;",
        f"{after.read_gb_s:.1f} GB/s, {after.gflop_s:.1f} GFLOP/s after ({before.dtype}, {before.threads} threads)",
    )


def add_achieved(report: Report, label: str, prefix: str, work: Work, seconds: float, machine: Machine) -> None:
    """Figures `<prefix>gb_s`, `<prefix>gflop_s` and their shares of the machine's, with a line."""
    read, computed = work.read_bytes / seconds / 1e9, work.flops / seconds / 1e9
    shares = read / machine.read_gb_s, computed / machine.gflop_s
    report.figures |= {
        f"{prefix}gb_s": read,
        f"{prefix}gflop_s": computed,
        f"{prefix}share_of_gb_s": shares[0],
        f"{prefix}share_of_gflop_s": shares[1],
    }
    report.row(
        label,
        f"{read:.3g} GB/s ({shares[0]:.1%} of the machine)",
        f"{computed:.3g} GFLOP/s ({shares[1]:.1%})",
    )


def best(before: Machine, after: Machine) -> Machine:
    """What the machine showed that it can do: the better of the two probes, each figure by itself."""
    return Machine(
        read_gb_s=max(before.read_gb_s, after.read_gb_s),
        gflop_s=max(before.gflop_s, after.gflop_s),
        threads=before.threads,
        dtype=before.dtype,
    )
