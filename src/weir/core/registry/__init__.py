"""Which model revisions are approved, under which names they are reached, and what they cost."""
