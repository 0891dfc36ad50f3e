"""Makes helpers of the core's own tests importable."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_CORE, _REFERENCE = _ROOT / "core" / "tests", _ROOT / "plugins" / "reference" / "tests"
sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(_CORE / name) for name in ("modeling", "system", "loop", "runner", "distributed")),
    *(str(_REFERENCE / name) for name in ("parity", "attention")),
]

from dealt_harness import way  # noqa: E402, F401
