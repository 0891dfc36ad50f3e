"""Makes the helpers of these and of the loop, runner and attention tests importable."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parent.parent
_REFERENCE = Path(__file__).parents[3] / "plugins" / "reference" / "tests"
sys.path[:0] = [
    *(str(_TESTS / name) for name in ("system", "loop", "runner", "distributed")),
    str(_REFERENCE / "attention"),
]
