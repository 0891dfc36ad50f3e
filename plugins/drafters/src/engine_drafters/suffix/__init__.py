"""Drafter `suffix`: what followed the longest piece of text that ends like this one."""
