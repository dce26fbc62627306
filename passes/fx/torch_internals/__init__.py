"""The wall around torch's internals: private names of torch are imported here, and by no other module of the two packages.

What torch has no public name for is in one file for each area, so that a module loads no more of torch than it needs:

    core          what ``import torch`` loads already
    operators     Inductor's own operators, and how it decomposes those of ATen
    aot           AOTAutograd, and what Inductor does to whole graphs
    dynamo        Dynamo
    inductor      Inductor as a compiler, of graphs and of C++
    distributed   torch.distributed
    triton        what generated Triton kernels import; only where there is Triton

    patches       what is replaced of torch's, and how torch gets it back

Beside each name stands what it is needed for. All of them exist in torch 2.11 to 2.15, and do and take the same there as far as
they are used, unless something else is said beside them. tests/test_architecture.py fails where a private name is imported
elsewhere, and where the installed torch lacks one of these, and says which. What differs between versions in public calls is in
``fsdp_compile/torch_versions.py``.

Operators of ATen are no private names, whatever they are called. Private attributes of objects (``DTensor._local_tensor``,
``Tensor._post_accumulate_grad_hooks``) are not seen by these tests and stay where they are used.
"""
