"""Makes `definition`, the numpy twin of the operations, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
