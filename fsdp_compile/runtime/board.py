"""Board: positions of ranks, which they post in the store for ranks that wait.

A rank that waits cannot see why. It compares its position with those that other ranks posted. Three things tell that two ranks
have parted, where one of them could also be only slow:

- They have run other programs, or an exception ended one rank's program and not the other's.
- A rank waits in a comparison that the other one has skipped.
- A rank that has begun fewer programs has begun more collectives: it is in a collective of torch, such as that of a checkpoint,
  which the other one did not begin before its next program; or its program is beyond the place at which the other one left it.

A post may be old. All three stay true when the rank goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

#: Ways in which a rank waits: in a program, or in a collective of torch.
IN_PROGRAM, IN_TORCH = "program", "collective"


class Step(NamedTuple):
    """A program in the history of a rank, or an exception that ended one.

    Attributes:
        number: the number of the program.
        program: the program. Its text names it.
        mixed: a hash of all programs so far, and of the parameters that they ran for.
        param: the name of a parameter that the program runs for; empty: its text names them.
        begun: the collectives that this rank had begun when the step began, over each of some process groups.
        updates: the number of optimizer steps before.
        time: when the step began, in seconds since the epoch.
        error: the exception, as text, and where it was raised; empty: the step is a program.
    """

    number: int
    program: Any
    mixed: int
    param: str = ""
    begun: tuple[int, ...] = ()
    updates: int = 0
    time: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return self.error
        return f"{self.program}, for {self.param}" if self.param else str(self.program)


class Position(NamedTuple):
    """The position of a rank.

    Attributes:
        number, mixed, title, began: its last step. ``began`` is ``Step.begun``.
        asking: the number of the comparison in which the rank waits, and its program; None: it is in none.
        begun: the collectives that the rank has begun so far.
        waits: :data:`IN_PROGRAM`; or :data:`IN_TORCH` if no other thread of the rank communicates; else empty.
        place: the line of the user's code that it runs.
        exception: the number and the hash of its last step that is an exception, and the text; None: it met none.
    """

    number: int
    mixed: int
    title: str
    began: tuple[int, ...]
    asking: tuple[int, str] | None = None
    begun: tuple[int, ...] = ()
    waits: str = ""
    place: str = ""
    exception: tuple[int, int, str] | None = None

    def pack(self) -> str:
        return json.dumps(self)

    @staticmethod
    def unpack(packed: bytes) -> Position:
        values: list[Any] = [tuple(value) if isinstance(value, list) else value for value in json.loads(packed)]
        return Position(*values)

    def has_met(self, step: Step) -> bool:
        """Return whether the rank has met an exception of another rank, too, and at the same place."""
        return self.exception is not None and (
            self.exception[0] > step.number or self.exception[:2] == (step.number, step.mixed)
        )


class Difference(NamedTuple):
    """A difference between two ranks, which have parted.

    Attributes:
        own, other: where each of the two is, as text.
        failed: whether one of the two has met an exception, and which: "own", "other" or "".
    """

    own: str
    other: str
    failed: str = ""


def difference(steps: Iterable[Step], post: Position, passed: int, *, is_stuck: bool = False) -> Difference | None:
    """Compare the history of this rank with the position of another one.

    Args:
        steps: the last steps of this rank, in their order.
        post: the position of the other rank.
        passed: the number of the last comparison that this rank has passed.
        is_stuck: whether this rank has been in its last program for so long that it leaves it, too, if the other rank has.
            A message may be lost with the tensors of a program that an exception ended.

    Returns:
        The difference; None: the ranks have not parted, as far as this rank can tell.
    """
    known = {step.number: step for step in steps}
    met = next((step for step in reversed(known.values()) if step.error), None)
    if met is not None and post.number >= met.number and not post.has_met(met):
        return Difference(str(met), f"{post.title} (program {post.number} over this group)", "own")
    if post.exception is not None:
        number, mixed, error = post.exception
        if number in known and known[number].mixed != mixed:
            return Difference(f"{known[number]} (program {number} over this group)", error, "other")
        if is_stuck and number - 1 in known and number not in known:
            return Difference(f"{known[number - 1]} (program {number - 1} over this group)", error, "other")
    here, after = known.get(post.number), known.get(post.number + 1)
    if here is None:
        return None
    if here.mixed != post.mixed:
        return Difference(f"{here} (program {here.number} over this group)", f"{post.title} (program {here.number})")
    if after is None:
        return None
    failed = "own" if after.error else ""
    own = str(after) if after.error else f"{after} (program {after.number} over this group)"
    # No comparison is passed without this rank, and a rank passes a comparison before it runs the compared program.
    if post.asking is not None and passed < post.asking[0]:
        return Difference(own, f"{post.asking[1]} (about to run, as program {after.number})", failed)
    # If they had begun different numbers of collectives before, messages between single ranks were counted.
    if post.waits and here.begun == post.began and any(map(int.__gt__, post.begun, after.begun)):
        return Difference(own, f"{post.title} (program {here.number}), and another collective, at {post.place}", failed)
    return None
