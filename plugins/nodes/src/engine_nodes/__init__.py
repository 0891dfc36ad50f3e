"""Machines with an agent on each: driver `agent` of point nodes, and `engine join`."""
