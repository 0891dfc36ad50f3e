"""`python -m engine` is the same as `engine`."""

from engine.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
