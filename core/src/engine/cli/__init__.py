"""The `engine` program. Commands are imported when they are called, so that `--help` is quick."""
