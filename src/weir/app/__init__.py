"""The composition root: the only place that knows adapters and shells alike. Nothing imports it but the command line."""
