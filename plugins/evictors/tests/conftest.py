"""Makes the schedules of the core's own tests importable: an evictor must change nothing but the hit rate."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "core" / "tests" / "loop"))
