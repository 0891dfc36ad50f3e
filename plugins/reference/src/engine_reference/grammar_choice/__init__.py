"""Grammar `choice`: the output is one of some texts."""
