"""A learning-rate schedule."""

from __future__ import annotations

import argparse
import math


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine down to a tenth.

    It depends on the step alone, so that --resume continues the schedule.
    """
    warmup = min(1.0, (step + 1) / max(1, args.warmup))
    progress = max(0, step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * warmup * (0.55 + 0.45 * math.cos(math.pi * progress))
