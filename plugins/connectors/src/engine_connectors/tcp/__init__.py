"""Connector `tcp`: keys and values from one engine to another, over the network."""
