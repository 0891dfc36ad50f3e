"""Floor 2: one file a point. A card describes a driver without torch; a body does the work.

Together with `engine.types`, `engine.plugin` and `engine.modeling` this is all that a plugin may import.
"""
