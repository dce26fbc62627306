import expecttest
import torch

from passes.collectives.divide_factors import Averaging
from passes.ir.reduction import Factor, Operand, Reduction, Sync, stages


def _name(operand: Operand | None) -> str:
    if operand is None:
        return "-"
    return f"factor {operand.number}" if isinstance(operand, Factor) else operand.value


def _outline(reduction: Reduction, *, replicas: bool = False, is_scattered: bool = False) -> str:
    """Return a line for each stage: its role, function and operands."""
    found = stages(
        reduction,
        dims=[0],
        group="shard",
        replicate_group="replicate" if replicas else "",
        grad_dtype=torch.float32,
        is_scattered=is_scattered,
    )
    lines = [f"{stage.role}: {stage.function.__name__}({', '.join(map(_name, stage.operands))})" for stage in found]
    return "\n".join(lines) + "\n"


class TestStages(expecttest.TestCase):
    def test_one_mesh_dimension(self) -> None:
        self.assertExpectedInline(
            _outline(Reduction(averaging=Averaging(divides_result=True))),
            """\
start_reduce: start_reduce_scatter(-, -)
finish_reduce: finish_reduce_scatter(-, -)
finish_reduce: finish_reduction(factor 0)
""",
        )

    def test_replicas_after_microbatches(self) -> None:
        averaging = Averaging(divides_gradient=True, divides_result=True)
        reduction = Reduction(averaging=averaging, has_unsharded=True, has_partial=True)
        self.assertExpectedInline(
            _outline(reduction, replicas=True),
            """\
start_reduce: start_reduce_scatter(unsharded, factor 0)
all_reduce: start_all_reduce(-, partial)
finish_reduce: finish_all_reduce()
finish_reduce: finish_reduction(factor 1)
""",
        )

    def test_scatter_leaves_the_replicas_out(self) -> None:
        self.assertExpectedInline(
            _outline(Reduction(Sync.SCATTER, has_partial=True), replicas=True),
            """\
start_reduce: start_reduce_scatter(-, -)
finish_reduce: finish_reduce_scatter(-, partial)
""",
        )

    def test_factors_are_numbered_in_the_order_of_their_places(self) -> None:
        reduction = Reduction(averaging=Averaging(divides_scattered=True, divides_result=True))
        self.assertExpectedInline(
            _outline(reduction, replicas=True),
            """\
start_reduce: start_reduce_scatter(-, -)
all_reduce: start_all_reduce(factor 0, -)
finish_reduce: finish_all_reduce()
finish_reduce: finish_reduction(factor 1)
""",
        )

    def test_what_was_scattered_is_reduced_over_replicas_only(self) -> None:
        reduction = Reduction(averaging=Averaging(divides_gradient=True, divides_result=True), has_partial=True)
        self.assertExpectedInline(
            _outline(reduction, replicas=True, is_scattered=True),
            """\
all_reduce: start_all_reduce()
finish_reduce: finish_all_reduce()
finish_reduce: finish_reduction(factor 1)
""",
        )

    def test_hook_that_reduces_in_place_leaves_no_all_reduce(self) -> None:
        reduction = Reduction(comm_hook=lambda grad: None, comm_hook_in_place=True)
        self.assertExpectedInline(
            _outline(reduction, replicas=True),
            """\
start_reduce: start_reduce_scatter(-, -)
finish_reduce: finish_reduce_scatter(-, -)
finish_reduce: finish_reduction(-)
""",
        )

    def test_one_rank_sends_nothing(self) -> None:
        (start, finish, _) = stages(Reduction(), dims=[0], group="", replicate_group="", grad_dtype=torch.float32)
        assert start.constants["op"] == ""
        assert not finish.constants["in_flight"]
