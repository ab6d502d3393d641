"""Replicas as the coordinator sees them, and which of them takes a request."""
