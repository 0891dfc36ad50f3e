"""Makes the drivers of these tests importable: here, and in the processes that suites start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
