"""KV connector `redis`: pages in a Redis server, for engines on several machines."""
