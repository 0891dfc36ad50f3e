"""Tokenizer `hf`: Hugging Face's tokenizer.json on the tokenizers library, chat templates on jinja2."""
