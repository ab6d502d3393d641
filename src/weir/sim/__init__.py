"""A deterministic world: virtual time and seeded randomness, in which the real parts run against simulated engines."""
