"""The passes: each takes a graph and changes it. :mod:`passes.pipeline` lists them in their order.

**Arguments.** A pass takes an FX graph: a ``Graph``, or a ``GraphModule`` if it reads attributes of the module. It may also
take the plan of a call (:mod:`passes.ir.plan`), the interface to which it adds inputs and outputs (:mod:`passes.ir.interface`),
and a schedule. It reads nothing else: no model, no process group, no clock. So ranks with the same graph and plan get the same
result. From the joint graph on, every node that stands for a tensor has its fake value in ``meta["val"]``.

**Result.** A pass changes the graph in place. It returns nothing, or a note on what it did, for logs. Afterwards the graph
passes ``lint()``, the pass has left no dead nodes, and every new node has its fake value, which :func:`passes.fx.emit.emit`
sets for tensor code. Nodes that later passes or the schedule have to find are marked with their work
(:mod:`passes.ir.work`). A pass does not touch nodes of others, such as the model's own collectives, or a graph in
which it has nothing to do. It raises an error that names the parameter where it cannot be right.

**Facts that a pass removes from the graph,** and that a later one needs, are read before by a function beside the pass, which
changes nothing and returns values: ``locate_shards``, ``find_prefetches``.

**Header.** The docstring of the module, which has the pass's name: the name and one sentence on what it does (docs/passes.md
prints it), the graph ``Before:`` and ``After:`` the pass, and what it ``Leaves alone``.
"""
