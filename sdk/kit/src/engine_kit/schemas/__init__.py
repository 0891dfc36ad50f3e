"""JSON schemas and regular expressions for grammar drivers: read, worked out, written in few words."""
