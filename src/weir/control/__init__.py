"""Slow loops and administrative commands: what is approved, and how it reaches the data plane. Never on a token's path."""
