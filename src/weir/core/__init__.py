"""The pure core: values in, values out. No event loop, clock, randomness, IO or logging; time and seeds are inputs."""
