"""Drafter `ngram`: what followed the same words earlier."""
