"""`python -m tests.script FILE ARGS` is `python FILE ARGS`, which can be forked: see `template.py`."""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
