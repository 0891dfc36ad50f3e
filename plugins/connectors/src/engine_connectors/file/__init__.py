"""KV connector `file`: pages in a folder, which outlives the engine and may be shared by several."""
