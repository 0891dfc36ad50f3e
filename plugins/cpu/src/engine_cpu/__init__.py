"""Native drivers for processors."""
