"""A driver of the point model, for Engine."""
