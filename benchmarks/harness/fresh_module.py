"""Load a Python file anew, with classes and functions of its own each time.

Dynamo caches compiled code with the code object of a forward. Systems that shared a class would search each other's cache
entries at each step.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def fresh_module(path: Path) -> ModuleType:
    """Execute a file once more and return the new module."""
    # A name inside this package, so that relative imports of the file work.
    name = f"{__package__}.fresh_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while it is being executed.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
