"""Settings: what can be set, where values come from, and the validated result (`settings`, which imports pydantic)."""
