"""Makes its own helper and those of the loop's tests importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[4] / "core" / "tests" / "loop")]
