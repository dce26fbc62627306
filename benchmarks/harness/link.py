"""Two network namespaces and a link of a given rate, so that ranks on one machine communicate as over a network."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

LOOPBACK = "loopback"


class LinkError(SystemExit):
    """The error of a machine that cannot make a shaped link. It ends the script with a message and no traceback."""


@dataclass(frozen=True)
class Link:
    """The network between ranks.

    Attributes:
        interface: the network interface that Gloo is to use.
        namespaces: network namespaces, each for an equal number of consecutive ranks; empty for loopback.
        ranks: the number of ranks.
    """

    interface: str
    namespaces: tuple[str, ...] = ()
    ranks: int = 2

    def command(self, rank: int, command: list[str]) -> list[str]:
        """Return a command that runs ``command`` in the network namespace of ``rank``."""
        if not self.namespaces:
            return command
        return ["ip", "netns", "exec", self.namespaces[rank * len(self.namespaces) // self.ranks], *command]


@contextlib.contextmanager
def make_link(rate: str, ranks: int = 2, within: str = LOOPBACK) -> Iterator[Link]:
    """Link two halves of the ranks while the block runs.

    Args:
        rate: of the link in each direction, in tc's notation (``2gbit``, ``500mbit``); or ``loopback``, without namespaces.
        ranks: the number of ranks.
        within: the rate between ranks of one half, for all of them and both directions together.

    Raises:
        LinkError: the rate is malformed, or this machine cannot make network namespaces. They need root, ``ip`` and ``tc``.
    """
    if rate == LOOPBACK:
        yield Link("lo")
        return
    for each in {rate, within} - {LOOPBACK}:
        _check(each)
    name = f"fsdp-{secrets.token_hex(4)}"
    link = Link("veth0", (f"{name}-0", f"{name}-1"), ranks)
    made = []
    try:
        for namespace in link.namespaces:
            _run("ip", "netns", "add", namespace)
            made.append(namespace)
        _run(*"ip link add veth0 netns {} type veth peer name veth0 netns {}".format(*link.namespaces).split())
        for index, namespace in enumerate(link.namespaces):
            inside = ("ip", "-n", namespace)
            _run(*inside, "addr", "add", f"10.0.0.{index + 1}/24", "dev", "veth0")
            _run(*inside, "link", "set", "veth0", "up")
            _run(*inside, "link", "set", "lo", "up")
            for device, limit in (("veth0", rate), ("lo", within)):
                if limit != LOOPBACK:
                    shape = f"qdisc add dev {device} root tbf rate {limit} burst 256kb latency 100ms"
                    _run("tc", "-n", namespace, *shape.split())
        yield link
    finally:
        for namespace in made:
            # Deleting a namespace deletes its end of the link, and thereby the other end.
            subprocess.run(["ip", "netns", "del", namespace], check=False)


def _check(rate: str) -> None:
    if not re.fullmatch(r"\d+(\.\d+)?[kmgt]bit", rate):
        raise LinkError(f"--link takes {LOOPBACK!r} or a rate such as '2gbit' or '500mbit', not {rate!r}")
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise LinkError(f"a shaped link needs {' and '.join(missing)} of iproute2; install it, or use --link {LOOPBACK}")
    if os.geteuid() != 0:
        raise LinkError(f"a shaped link needs root, to make network namespaces; use --link {LOOPBACK} without")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
