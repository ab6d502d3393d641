"""Adapters of the Engine and Launcher ports: how the platform reaches inference servers.

They translate between ours and an engine's words; they never decide who runs, what is delivered or what it costs.
"""
