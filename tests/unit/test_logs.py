"""What a process writes to its standard error: one JSON object per line, whoever logs."""

import json
import subprocess
import sys

PROGRAM = """
import logging
from weir.telemetry import configure_logs
configure_logs()
logging.getLogger("uvicorn.error").warning("Something %s.", "odd")
logging.getLogger("uvicorn.access").info("not wanted")
try:
    raise RuntimeError("inner")
except RuntimeError:
    logging.getLogger("asyncio").exception("It broke")
"""


def test_libraries_log_in_our_form() -> None:
    """Protects whoever parses the log: a library's warnings and tracebacks are lines of ours, its chatter is not shown."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert (first["event"], first["level"], first["library"]) == ("library_log", "warning", "uvicorn.error")
    assert first["message"] == "Something odd." and "exception" not in first
    assert (second["level"], second["message"]) == ("error", "It broke") and "RuntimeError: inner" in second["exception"]
    assert done.stdout == ""
