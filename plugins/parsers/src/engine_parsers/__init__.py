"""Parsers of tool calls and of reasoning, in the forms that model families write."""
