"""KV connectors: keys and values beyond one engine's pool."""
