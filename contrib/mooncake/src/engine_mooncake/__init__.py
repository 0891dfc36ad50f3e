"""KV connector `mooncake`: pages in a Mooncake Store."""
