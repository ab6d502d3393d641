"""Files and batches of tenants: kept for surfaces by the desk, run by the worker through the pipeline of every request."""
