"""Packages that the examples need, and the library does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def need(*packages: str) -> None:
    """Exit with one line that says what to install, unless all of these packages are installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        script = Path(sys.argv[0]).name
        sys.exit(f"{script} needs {' and '.join(missing)}: pip install -c constraints.txt -e '.[examples]'")
