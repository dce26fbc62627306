"""Load a Python file anew, with classes and functions of its own each time.

Dynamo keeps what it compiled with the code of a forward. Systems that shared a class would search each other's entries at each
step.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def fresh_module(path: Path) -> ModuleType:
    """The module of a file, executed once more."""
    # In this package, for files that import from it.
    name = f"{__package__}.fresh_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while it is being executed.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
