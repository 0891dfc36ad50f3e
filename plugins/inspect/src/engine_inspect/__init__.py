"""What is installed, what an engine would be started with, and why: `engine plugins`, `config`, `plugins why`."""
