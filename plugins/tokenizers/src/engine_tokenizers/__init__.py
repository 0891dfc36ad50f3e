"""Tokenizers `mistral` and `sentencepiece`: files that are no tokenizer.json, read by the libraries that wrote them."""
