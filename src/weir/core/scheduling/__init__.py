"""Who waits where, whose turn it is, and what starts now. Decisions are values; the coordinator carries them out."""
