"""What the server has measured, for Prometheus."""
