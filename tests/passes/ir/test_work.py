import torch

from passes.ir.work import BucketName, Role, Work, bucket, kernel_boundaries, mark, nodes_of, role, work
from tests.passes.tracing import PassTestCase


def test_names_print_what_a_bucket_holds() -> None:
    assert str(BucketName.of_unit("blocks.0")) == "blocks.0"
    assert str(BucketName((("blocks.0", 1), ("blocks.1", None)))) == "blocks.0/1+blocks.1"
    assert BucketName((("blocks.0", 1), ("blocks.1", None))).unit_buckets == ("blocks.0", "blocks.1")
    assert str(Work(Role.START_GATHER, BucketName.of_unit("head"))) == "start_gather head"


def test_a_unit_whose_name_ends_in_a_number_is_no_piece() -> None:
    assert BucketName.of_unit("a/0") != BucketName((("a", 0),))


class TestNodes(PassTestCase):
    def test_marked_nodes_are_found(self) -> None:
        gm = self.trace(lambda x: (x.sin().cos(), x.exp()), torch.zeros(2), names="x")
        sin, cos, exp = (node for node in gm.graph.nodes if node.op == "call_function")
        first, second = BucketName.of_unit("first"), BucketName.of_unit("second")
        mark(sin, Work(Role.START_REDUCE, first))
        mark(cos, Work(Role.START_REDUCE, first))
        mark(exp, Work(Role.START_REDUCE, second))
        assert nodes_of(gm.graph, Role.START_REDUCE) == {first: [sin, cos], second: [exp]}
        assert nodes_of(gm.graph, Role.FINISH_REDUCE) == {}
        assert (role(sin), bucket(exp)) == (Role.START_REDUCE, second)
        # Kernels begin at the first node of each copy-in.
        assert kernel_boundaries(gm.graph) == {sin, exp}

    def test_nodes_of_the_model_do_no_work(self) -> None:
        gm = self.trace(lambda x: x.sin(), torch.zeros(2), names="x")
        assert all(work(node) is role(node) is bucket(node) is None for node in gm.graph.nodes)
