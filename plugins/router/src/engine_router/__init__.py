"""`engine route`: one front of several servers, which balances them, or lets some compute prompts for others."""
