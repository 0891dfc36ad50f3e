"""KV connector `lmcache`: pages in LMCache's remote stores."""
