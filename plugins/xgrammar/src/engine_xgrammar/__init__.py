"""Grammar `xgrammar`: structured outputs by XGrammar."""
