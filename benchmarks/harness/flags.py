"""Types of command-line flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def names_of(kind: str, choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: some of ``choices``, separated by commas.

    Args:
        kind: the kind of thing that has these names, for the error.
        choices: the names.
    """

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"no such {kind}: {', '.join(unknown)}; there are {', '.join(choices)}")
        return names

    return parse
