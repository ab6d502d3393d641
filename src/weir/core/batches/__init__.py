"""Batches: what their files may be, what is recorded of them, and how they go on, as pure code."""
