"""The command line: thin clients of the management and generation APIs, and the commands that run a cell."""
