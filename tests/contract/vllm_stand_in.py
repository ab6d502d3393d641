"""An interpreter that has a stand-in for vLLM among its packages."""

import shutil
import sys
from pathlib import Path

from tests.contract import stand_in_server

import weir


def install_stand_in(folder: Path) -> str:
    """The path of an interpreter to start vLLM with."""
    package = folder / "packages/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    shutil.copyfile(stand_in_server.__file__, package / "api_server.py")
    packages = f"{folder / 'packages'}:{Path(weir.__file__).parents[1]}"
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    return str(interpreter)
