"""Ops driver `states`: from the states before a step's rows to those behind them."""
