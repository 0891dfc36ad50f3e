"""Training what drafts for the bundled model. See `python -m engine_drafters.train --help`."""
