"""The session between a gateway and the coordinator over a socket: frames, exactly-once delivery, both ends."""
