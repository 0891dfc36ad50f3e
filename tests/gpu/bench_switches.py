"""What waits for a measurement before it becomes the default: a model's decode steps with each of it, and with all.

python -m tests.gpu.bench_switches --model dummy:0.6B --title 0.6B --work decode1,decode256
"""

from __future__ import annotations

import argparse
import subprocess
import sys

WHOLE, DEPENDENTS, FEW_ROWS = "platform.capture_whole=auto", "platform.dependents=auto", "ops=triton_gemv,triton"
SWITCHES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "one graph a step": (WHOLE,),
    "dependents": (DEPENDENTS,),
    "products of few rows": (FEW_ROWS,),
    "all three": (WHOLE, DEPENDENTS, FEW_ROWS),
    "and products by time": (WHOLE, DEPENDENTS, FEW_ROWS, "ops.choose=time", "ops.cache="),
    "as it is, again": (),
}
"""Settings of the engine; what does not change is measured first and last: by how much these two differ, the others may
by chance."""


def main() -> None:
    """A process each, one after the other. Ends with 1 where one has failed."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_switches", description=__doc__)
    flags.add_argument("--model", default="dummy:0.6B")
    flags.add_argument("--title", default="0.6B")
    flags.add_argument("--work", default="decode1,decode256")
    flags.add_argument("--only", default="", help=f"of {', '.join(SWITCHES)}; comma-separated")
    asked = flags.parse_args()
    if unknown := {name for name in asked.only.split(",") if name} - set(SWITCHES):
        flags.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(SWITCHES)}")
    failed = False
    for name, settings in SWITCHES.items():
        if asked.only and name not in asked.only.split(","):
            continue
        command = [sys.executable, "-m", "tests.gpu.bench_engine", "--model", asked.model, "--work", asked.work]
        command += ["--title", f"{asked.title}, {name}"]
        done = subprocess.run([*command, *(word for each in settings for word in ("--set", each))], check=False)
        failed |= done.returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
