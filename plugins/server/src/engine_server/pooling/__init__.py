"""The API of models that pool: vectors, labels and scores in place of text."""
