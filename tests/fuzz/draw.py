"""Random cases: a seed gives the same case on every machine."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from .blocks import KINDS, MOST_LENGTH
from .case import Block, Call, Case, Evaluate, Event, Freeze, Micro, Model, Path, Reload, Step, data_ranks
from .execute import OF_THE_LIBRARY, OPTIMIZERS

# Kinds whose first child can be a nested unit.
_HAVE_MODULES = ("mlp", "attention", "convolution", "experts", "lora", "looped", "nested", "structured", "target", "parallel")
_LENGTHS = (2, 5, 8, MOST_LENGTH)


class _CaseBuilder:
    """A case that is being drawn."""

    def __init__(self, seed: int, mesh: tuple[int, ...], compiled: bool, oracle: str, is_small: bool):
        self.random = Random(seed)
        self.mesh = mesh
        self.compiled = compiled
        self.oracle = oracle
        self.is_small = is_small
        self.with_fsdp2 = oracle == "fsdp2"

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def case(self) -> Case:
        self.model = self._model()
        self.optimizer = self._optimizer()
        self.options = self._options()
        self.features = self._features()
        # If sizes differ between ranks, each rank recompiles by itself. Options that choose by sizes exclude that: without a
        # given maximum, ranks could choose differently (docs/memory.md).
        self.sizes_differ = self.maybe(0.2) and not self._chooses_by_sizes()
        events: list[Event] = []
        for _ in range(2 if self.is_small else self.random.choice((2, 3, 3, 4))):
            events += self._between_steps()
            events += self._step()
        factor = self._factor()
        if self.compiled and "float32" in (self.model.dtype, *(self.model.policy or ())) and self.maybe(0.5):
            self.features = (*self.features, "padded")
        # Graphs that update parameters keep their order (docs/reliability.md).
        keep_order = self.optimizer == "in backward" and "other order" in self.features
        if self.compiled and not keep_order and self.maybe(0.3):
            self.features = (*self.features, "low thresholds")
        self._place()
        return Case(self.mesh, self.model, tuple(events), self.optimizer, self.features, self.options, factor)

    def _place(self) -> None:
        """Draw a placement, last of all, so that the case is else as without it."""
        kinds = {block.kind for block in self.model.blocks}
        excluded = {"tensor parallel", "rounded", "offload", "hook"}.intersection(self.features) or "extended" in kinds
        if self.with_fsdp2 or excluded or not self.maybe(0.3):
            return
        whole = ("zero1", "zero2") if self.optimizer == "in backward" else ("zero1", "zero2", "ddp")
        placement = "hybrid" if len(self.mesh) == 2 else self.random.choice(whole)
        self.features = (*self.features, placement)
        if placement != "hybrid":
            # They keep parameters whole.
            blocks = tuple(replace(block, reshard=None) for block in self.model.blocks)
            self.model = replace(self.model, blocks=blocks, reshard=None)

    def _model(self) -> Model:
        # FSDP2 refuses trainable parameters of several dtypes in one unit.
        known = [kind for kind in KINDS if kind != "routed" or not self.with_fsdp2]
        kinds = [self.random.choice(known) for _ in range(self.random.choice((1, 2) if self.is_small else (1, 2, 2, 3, 3, 4)))]
        blocks = []
        for index, kind in enumerate(kinds):
            checkpoint = self.random.choice(("", "", "", "around", "around", "inside"))
            units = ["own", "own", "own", ""]
            units += ["nested"] if kind in _HAVE_MODULES and checkpoint != "inside" else []
            units += ["with next"] if index + 1 < len(kinds) else []
            reshard: list[bool | int | None] = [None, None, True, False]
            if self.mesh == (4,) and "extended" not in kinds:
                reshard.append(2)
            blocks.append(Block(kind, checkpoint, self.random.choice(units), self.random.choice(reshard)))
        policy = None
        if self.maybe(0.25):
            policy = self.random.choice([("float64", None), ("float32", "float64"), (None, "float64"), ("float32", None)])
        return Model(
            tuple(blocks),
            "float64" if self.maybe(0.8) else "float32",
            tied=self.maybe(0.2),
            again=self.random.randrange(len(blocks)) if self.maybe(0.2) else None,
            policy=policy,
            reshard=self.random.choice([None, None, True, False]),
            cut_last=self.maybe(0.15) and "extended" not in kinds,
        )

    def _optimizer(self) -> str:
        extended = any(block.kind == "extended" for block in self.model.blocks)
        names = [name for name in OPTIMIZERS if not (self.with_fsdp2 or extended) or name not in OF_THE_LIBRARY]
        return self.random.choice(["sgd", *names])

    def _factor(self) -> float | None:
        return self.random.choice([1.0, 3.0, 8.0]) if self.maybe(0.15) and "hook" not in self.features else None

    def _features(self) -> tuple[str, ...]:
        features = ["by block"] if self.compiled and not self.options and self.maybe(0.15) else []
        if (
            self.mesh == (2, 2)
            and self.optimizer in ("sgd", "adamw")
            and self.model.policy is None
            and not self.model.cut_last
            and self.maybe(0.5)
        ):
            return (*features, "tensor parallel")
        if self.with_fsdp2:
            return tuple(features)
        features += ["rounded"] if self.oracle == "eager" else []
        if not self.options and self.optimizer not in ("in backward", "offloaded") and not features and self.maybe(0.1):
            features.append("offload")
        if len(self.mesh) == 1 and self.optimizer != "in backward" and self.maybe(0.15):
            features.append("hook")
        gated = [block for block in self.model.blocks if block.kind == "gated"]
        # A block of the root's unit that is compiled by itself is gathered by itself, and cannot be gathered whole.
        is_whole = "by block" not in features or all(block.unit for block in gated)
        if gated and is_whole and self.optimizer != "in backward" and not self._chooses_by_sizes() and self.maybe(0.7):
            features.append("uneven")
        ordered = any(block.kind == "ordered" for block in self.model.blocks)
        if ordered and not self._chooses_by_sizes() and self.maybe(0.7):
            features.append("other order")
        return tuple(features)

    def _chooses_by_sizes(self) -> bool:
        return not dict(self.options).keys().isdisjoint({"schedule", "memory_budget"})

    def _options(self) -> tuple[tuple[str, Any], ...]:
        if not self.compiled or self.with_fsdp2:
            return ()
        options = self.random.choice(
            [(), (), (), (("min_bucket_bytes", 0),), (("schedule", "auto"),), (("memory_budget", 1 << 40),)]
        )
        if self.optimizer == "in backward" and options not in ((), (("min_bucket_bytes", 0),)):
            return ()
        return options

    def _sizes(self) -> tuple[tuple[int, int], ...]:
        def one() -> tuple[int, int]:
            return self.random.choice((1, 2, 3, 4)), self.random.choice(_LENGTHS)

        return tuple(one() for _ in range(data_ranks(self.mesh, self.features))) if self.sizes_differ else (one(),)

    def _paths(self) -> list[str]:
        """Return the paths of modules that are passed to ``fully_shard``; the root's is empty."""
        units = [f"blocks.{index}" for index, block in enumerate(self.model.blocks) if block.unit]
        grouped = {index + 1 for index, block in enumerate(self.model.blocks) if block.unit == "with next"}
        return ["", *(path for path in units if int(path.removeprefix("blocks.")) not in grouped)]

    def _may_skip(self) -> list[int]:
        blocks = self.model.blocks
        grouped = {at for index, block in enumerate(blocks) if block.unit == "with next" for at in (index, index + 1)}
        return [index for index in range(len(blocks)) if index not in grouped]

    def _between_steps(self) -> list[Event]:
        events: list[Event] = []
        if self.maybe(0.2):
            # FSDP2 cannot gather into a buffer that it first allocated in inference mode.
            events.append(Evaluate(self._sizes(), self.maybe(0.5) and not self.with_fsdp2))
        if self.maybe(0.1):
            events.append(Reload(self.random.choice(("model", "full", "optimizer"))))
        if self.maybe(0.1) and not self.with_fsdp2 and self.optimizer in ("sgd", "adamw", "foreach", "fused"):
            path = f"blocks.{self.random.randrange(len(self.model.blocks))}"
            if self.model.blocks[int(path.removeprefix("blocks."))].kind not in ("lora", "tied"):
                events.append(Freeze(path, self.maybe(0.5)))
        if self.maybe(0.15):
            path = self.random.choice(self._paths())
            events.append(Call("unshard", path))
            if self.maybe(0.5):
                events.append(Call("reshard", path))
        return events

    def _call(self, between: bool = False) -> Call:
        path = self.random.choice(self._paths())
        kinds = ["sync", "sync", "reshard after backward", "last"]
        # The automatic schedule refuses prefetch lists.
        kinds += ["prefetch"] if ("schedule", "auto") not in self.options else []
        kinds += ["all-reduce"] if len(self.mesh) == 2 and "tensor parallel" not in self.features else []
        kinds += ["reshard after forward"] if not self.compiled or not between else []
        kind = self.random.choice(kinds)
        recurse = (("recurse", self.maybe(0.5)),) if self.maybe(0.5) else ()
        value = (self.maybe(0.5),)
        if kind == "last":
            return Call("set_is_last_backward", "", value)
        if kind == "prefetch":
            some = tuple(Path(self.random.choice(self._paths())) for _ in range(self.random.choice((0, 1, 2))))
            return Call(f"set_modules_to_{self.random.choice(('forward', 'backward'))}_prefetch", path, (some,))
        name = {"sync": "requires_gradient_sync", "all-reduce": "requires_all_reduce"}.get(kind, kind.replace(" ", "_"))
        return Call(f"set_{name}", path, value, recurse)

    def _step(self) -> list[Event]:
        """Draw microbatches, the last of which reduces all gradients, and the optimizer's step."""
        events: list[Event] = []
        may_skip = self._may_skip()
        microbatches = self.random.choice((1, 1, 2, 3))
        defaults = (
            Call("set_requires_gradient_sync", "", (True,)),
            Call("set_is_last_backward", "", (True,)),
            Call("set_reshard_after_backward", "", (True,)),
        )
        for number in range(microbatches):
            is_last = number == microbatches - 1
            skips = tuple(index for index in may_skip if self.maybe(0.15))
            forwards = 2 if self.maybe(0.1) else 1
            if self.optimizer == "in backward":
                events.append(Call("set_requires_gradient_sync", "", (is_last,)))
                events.append(Micro(self._sizes(), skips, forwards))
                continue
            if is_last and microbatches > 1:
                events += defaults
            elif not is_last:
                events += [self._call() for _ in range(self.random.choice((0, 1, 1, 2)))]
            between = (self._call(between=True),) if not is_last and self.maybe(0.15) else ()
            events.append(Micro(self._sizes(), skips, forwards, between))
        # torch computes no norm over tensors of several meshes.
        may_clip = self.optimizer != "in backward" and "tensor parallel" not in self.features
        clip = self.random.choice([None, None, 0.5]) if may_clip else None
        return [*events, Step(clip)]


def draw(seed: int, mesh: tuple[int, ...], *, compiled: bool, oracle: str = "whole", is_small: bool = False) -> Case:
    """Draw the case of a seed.

    Args:
        seed: the seed.
        mesh: the shape of the mesh.
        compiled: whether the case will be compiled. Then no flag that traces anew is set between a forward and its backward.
        oracle: what the case will be compared with. For "fsdp2" it has only features of FSDP2; for "eager" it has rounded
            gathers.
        is_small: whether to draw at most two blocks and exactly two steps.
    """
    return _CaseBuilder(seed, mesh, compiled, oracle, is_small).case()
