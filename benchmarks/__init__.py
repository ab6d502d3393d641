"""Measurements of Weir beside the engine alone and nginx; run by `make bench`, never imported by the product."""
