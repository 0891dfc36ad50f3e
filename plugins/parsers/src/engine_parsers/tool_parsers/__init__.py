"""Tool parsers: the forms in which families of models write calls."""
