"""KV connector `host`: the swap tier in host memory."""
