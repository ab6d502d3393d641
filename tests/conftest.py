"""What every test shares: property tests without a time limit, and the same examples on every run, so that the coverage of
the core is a fact and not a draw. A soak (WEIR_SOAK=1) draws fresh examples. Servers of databases and objects stop with it."""

import os

from hypothesis import settings
from tests.postgres_server import stop_servers
from tests.s3_server import stop_s3_server

settings.register_profile("weir", deadline=None, derandomize="WEIR_SOAK" not in os.environ)
settings.load_profile("weir")


def pytest_unconfigure() -> None:
    """The end of a test process, also of one that works for another."""
    stop_servers()
    stop_s3_server()
