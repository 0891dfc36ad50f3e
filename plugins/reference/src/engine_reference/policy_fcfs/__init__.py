"""Scheduling policy `fcfs`: first come, first served."""
