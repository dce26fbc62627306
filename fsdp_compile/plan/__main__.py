"""Plan how to train a model, without a GPU.

    python -m fsdp_compile.plan train.py:build --gpus 8,64,1024 --hardware h100 --global-batch 2048

``build()`` is called with the meta device as default. It returns the model and its inputs, as ``explain`` takes
them. The batch of these inputs does not count. Each block in an outermost ``nn.ModuleList`` becomes a unit; the rest is one
unit.

The search covers splits into shards and replicas, microbatches, ways to accumulate, resharding policies and activation
checkpoints. Formulae evaluate the points. The best point for each number of GPUs is traced and simulated, with both schedules.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..explain.make_report import hardware_of
from .policies import Policy, path_of_layers
from .render import plan_table
from .search import Search
from .winners import check_winner, plot_scaling

# GiB of memory of the table's GPUs, by data sheet, and the part of it that tensors may fill. The rest is for CUDA, for
# communication, and for gaps between tensors.
_MEMORY_GIB = {"A100": 80, "H100": 80, "H200": 141, "B200": 180}
_USABLE = 0.9


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_compile.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="FILE.py:FUNCTION", help="or package.module:FUNCTION")
    parser.add_argument("--gpus", type=_numbers, default=[8, 64, 512], metavar="N,N", help="numbers of GPUs to plan for")
    parser.add_argument("--hardware", default="h100", help="a100, h100, h200, b200, or the file of a calibration")
    parser.add_argument("--global-batch", type=int, required=True, metavar="N", help="sequences of a step, of all GPUs")
    parser.add_argument("--memory", type=float, metavar="GIB", help="the most of a GPU; default: 90 %% of what it has")
    parser.add_argument("--optimizer", default="adamw", help="adamw, momentum, sgd, or bytes of state for each element")
    parser.add_argument("--param-dtype", type=_dtype, metavar="DTYPE", help="that parameters compute in, bfloat16 for example")
    parser.add_argument("--reduce-dtype", type=_dtype, metavar="DTYPE", help="that gradients are reduced in")
    parser.add_argument("--best", type=int, default=3, metavar="N", help="points to show of each size")
    parser.add_argument("--plot", metavar="FILE", help="tokens a second over GPUs, as a picture")
    args = parser.parse_args(argv)
    hardware = _or_exit(parser, lambda: hardware_of(args.hardware))
    if args.memory is None and hardware.name not in _MEMORY_GIB:
        parser.error(f"--memory has to be given for {hardware.name}, of which it is not known")
    memory = args.memory if args.memory is not None else _USABLE * _MEMORY_GIB[hardware.name]
    model, inputs = _or_exit(parser, lambda: build(args.model))
    optimizer = float(args.optimizer) if args.optimizer.replace(".", "", 1).isdigit() else args.optimizer
    base = Policy(False, True, False, param_dtype=args.param_dtype, reduce_dtype=args.reduce_dtype)
    search = Search(
        model, inputs, hardware, args.global_batch, memory * 2**30, base, optimizer, lambda text: print(text, file=sys.stderr)
    )
    winners = []
    for gpus in args.gpus:
        points = search.best(gpus, args.best)
        if not points:
            print(f"{gpus} GPUs: nothing fits in {memory:.4g} GiB. {_why_not(search, gpus)}\n")
            continue
        checked = check_winner(search, points[0])
        winners.append(checked)
        print(plan_table(search, gpus, points, checked, path_of_layers(model)), flush=True)
    print(
        f"{search.points} points were evaluated in {search.evaluating_s:.2g} s, after {search.tracing_s:,.0f} s of traces for "
        "their policies."
    )
    if args.plot and winners:
        plot_scaling(args.plot, search, winners)
        print(f"{args.plot} shows {search.unit} a second over GPUs.")


def build(target: str) -> tuple[nn.Module, Any]:
    """Call a function that makes a model and its inputs, with the meta device as default, and return both.

    Args:
        target: "file.py:function" or "package.module:function".

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    place, _, name = target.rpartition(":")
    if not place:
        raise ValueError(f"{target!r} names no function: give FILE.py:FUNCTION or package.module:FUNCTION.")
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name}. It is to return a model and its inputs.")
    with torch.device("meta"):
        built = function()
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
        raise ValueError(f"{target} has to return a model (an nn.Module) and its inputs, not {type(built).__name__}.")
    return built


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"There is no module {place}: {error}. Give a file as FILE.py:FUNCTION.") from error
    if not Path(place).exists():
        raise ValueError(f"There is no file {place}.")
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Copies of a model look up its classes in sys.modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _why_not(search: Search, gpus: int) -> str:
    least = search.least_memory(gpus)
    if least is None:
        return " ".join(f"{reason}." for reason in search.refused)
    return (
        f"What holds least takes {least.estimate.peak_bytes / 2**30:.4g} GiB: {least.shards} shards x {least.replicas}, "
        f"{least.microbatches} microbatches of {least.batch}, {least.policy}. Give more GPUs, or a model with smaller blocks."
    )


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if any(number < 2 for number in numbers):
        raise argparse.ArgumentTypeError("sharding takes at least two GPUs")
    return numbers


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text} is no dtype of torch")
    return dtype


def _or_exit(parser: argparse.ArgumentParser, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
