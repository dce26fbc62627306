"""Dependencies of traced code that no guard checks: its source, the rank, and environment variables."""

from __future__ import annotations

import dis
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType

from .frame_facts import NotPortable

# Dynamo replaces calls of these by their results, without a guard. Code that names one may be another on each rank.
_OF_RANK = frozenset(
    ["get_rank", "get_local_rank", "get_group_rank", "get_node_local_rank", "get_coordinate", "get_world_size"]
)
# Nor does it guard on the environment. Stored are the values of variables whose names are constants; code with these
# instructions may make names.
_OF_ENVIRONMENT = frozenset(["environ", "getenv"])
_MAKES_TEXT = frozenset(["FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "BUILD_STRING"])
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")
# A version tells the source of torch's modules. The source of this library's is in the key of a frame, and depends on no rank.
_OF_TORCH, _OWN = "torch.", ("fsdp_compile.", "passes.")


def digests_of_files(codes: Iterable[CodeType], described: Iterable[CodeType], facts: Iterable[str]) -> dict[str, str]:
    """Return the digest of each file with traced source, by the name of its module.

    Args:
        codes: the traced code.
        described: the code of functions and classes that facts describe.
        facts: the facts. They name functions that code calls by other names.

    Raises:
        NotPortable: traced code is in no file, or may be another on another rank.
    """
    modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    described, found = set(described), {}
    if any(f".{name} " in fact for fact in facts for name in _OF_RANK):
        raise NotPortable("code that asks for a rank")
    for code in codes:
        name = modules.get(code.co_filename, "")
        if not name and code not in described:
            raise NotPortable(f"{code.co_qualname}, whose source is in no file")
        if name.startswith(_OWN):
            continue
        if not _OF_RANK.isdisjoint(code.co_names):
            raise NotPortable(f"{code.co_qualname}, which asks for a rank")
        if name and not name.startswith(_OF_TORCH):
            found[name] = _digest_of_file(code.co_filename)
    return found


def names_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """Return all names of attributes that traced code may read."""
    texts = itertools.chain.from_iterable((*code.co_names, *code.co_consts) for code in codes)
    return frozenset(text for text in texts if isinstance(text, str))


def environment_of(codes: Iterable[CodeType], facts: Iterable[str]) -> dict[str, str | None]:
    """Return the environment variables that traced code may have read, with their values.

    Raises:
        NotPortable: the name of one is unknown.
    """
    codes, facts = list(codes), list(facts)
    readers = [code for code in codes if not _OF_ENVIRONMENT.isdisjoint(code.co_names)]
    if not readers and not any(name in fact for fact in facts for name in ("os._Environ", "os.getenv")):
        return {}
    for code in readers:
        if any(each.opname in _MAKES_TEXT for each in dis.get_instructions(code)):
            raise NotPortable(f"{code.co_qualname}, which makes names of environment variables")
    constants = [constant for code in codes for constant in code.co_consts if isinstance(constant, str)]
    names = {name for text in (*constants, *facts) for name in _VARIABLE.findall(text)}
    return {name: os.environ.get(name) for name in sorted(names)}


def changed_files(digests: Mapping[str, str]) -> str:
    """Return the first file that is not as it was, given the result of :func:`digests_of_files`; empty: all are."""
    for name, digest in digests.items():
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is None or _digest_of_file(path) != digest:
            return f"the source of {name}"
    return ""


def changed_variables(values: Mapping[str, str | None]) -> str:
    """Return the first variable that is not as it was, given the result of :func:`environment_of`; empty: all are."""
    changed = (name for name, value in values.items() if os.environ.get(name) != value)
    return next((f"the environment variable {name}" for name in changed), "")


def _digest_of_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
