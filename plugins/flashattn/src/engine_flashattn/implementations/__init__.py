"""One module for each library: `load()` imports it and binds its function to the one form that the body calls."""
