"""Makes `harness` and the attention tests' `dense` importable."""

import sys
from pathlib import Path

_REFERENCE = Path(__file__).parents[3] / "plugins" / "reference" / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(_REFERENCE / "attention")]
