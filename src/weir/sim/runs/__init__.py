"""Simulated runs: the real coordinator under a workload, on replicas that take time and fail, measured in virtual time."""
