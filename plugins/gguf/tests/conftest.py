"""Tiny models, written as GGUF files by ggml's own package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
