"""Makes the drivers of these tests importable, those of strangers as well: here, and in the processes that suites
start."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *map(str, sorted(HERE.glob("strangers/*/src")))]
