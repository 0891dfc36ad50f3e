"""The command: `python -m tests.gpu --wheels DIR`, which `make gpu-check` calls. Needs nothing but Python itself."""

from tests.gpu.first import main

main()
