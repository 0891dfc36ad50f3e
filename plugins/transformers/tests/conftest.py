"""Makes the tests of engine-models importable, whose checkpoints and comparisons these use, and what those use."""

import sys
from pathlib import Path

PLUGINS = Path(__file__).parents[2]
sys.path[:0] = [
    str(Path(__file__).parent),
    str(PLUGINS / "models" / "tests"),
    str(PLUGINS / "reference" / "tests" / "parity"),
]
