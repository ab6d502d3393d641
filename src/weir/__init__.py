"""Weir: a multi-tenant model-serving platform. Start reading at ARCHITECTURE.md, then `gateway/pipeline.py`."""

__version__ = "0.1.0"
