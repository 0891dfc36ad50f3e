"""KV connector `nixl`: keys and values from one engine to another, by one-sided reads."""
