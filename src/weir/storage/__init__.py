"""State: SQLite behind the store ports, the same in memory for the simulator, and the directory that one process owns."""
