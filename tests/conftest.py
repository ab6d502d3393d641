"""What every test shares: property tests without a time limit, and the same examples on every CI run."""

import os

from hypothesis import settings

settings.register_profile("weir", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("weir")
