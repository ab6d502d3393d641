"""The aliases of the cell that generated requests go to."""

ALIAS = "assistant"
VECTORS = "vectors"
"""Of the model that embeds."""
