"""The wall around torch's internals: private names of torch, and private attributes of its objects, are used here, and by no
other module of the two packages.

Names without a public counterpart are in one file for each area, so that a module loads no more of torch than it needs:

    objects       attributes of tensors, modules, nodes, process groups and the like
    core          names that ``import torch`` loads already
    operators     Inductor's own operators, and its decompositions of ATen's
    aot           AOTAutograd, and Inductor's passes over whole graphs
    dynamo        Dynamo
    inductor      Inductor as a compiler, of graphs and of C++
    distributed   torch.distributed
    triton        names that generated Triton kernels import; only where Triton is installed

    patches       the replacements in torch, and how they are undone

A comment beside each name says why it is needed. All names exist in torch 2.11 to 2.15, with the same parameters and behaviour
as far as they are used, unless the comment says otherwise. tests/test_architecture.py fails if another module uses a private
name, or if the installed torch lacks a name of these files. Public calls that differ between versions are in
``fsdp_compile/torch_versions.py``.

Operators of ATen do not count as private names, whatever they are called. Neither do attributes of ``self`` in a subclass.
"""
