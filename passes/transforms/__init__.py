"""The passes: each takes a graph and changes it. :mod:`passes.pipeline` lists them in their order.

**Arguments.** A pass takes an FX graph: a ``Graph``, or a ``GraphModule`` if it reads attributes of the module. It may also
take the plan of a call (:mod:`passes.ir.plan`), the interface to which it adds inputs and outputs (:mod:`passes.ir.interface`),
and a schedule. It reads nothing else: no model, no process group, no clock. So ranks with the same graph and plan get the same
result. From the joint graph on, every node that stands for a tensor has its fake value in ``meta["val"]``.

**Result.** A pass changes the graph in place. It returns nothing, or a note on its changes, for logs. Afterwards the graph
passes ``lint()``, the pass has left no dead nodes, and every new node has its fake value, which :func:`passes.fx.emit.emit`
sets for tensor code. Nodes that later passes or the schedule must find are marked with their work (:mod:`passes.ir.work`). A
pass does not touch other nodes, such as the model's own collectives, or a graph in which it has nothing to do. If it cannot
give a correct graph, it raises an error that names the parameter.

**Facts that a pass removes from the graph.** If a later pass needs such a fact, a function beside the pass reads it first. The
function returns values and leaves the graph unchanged: ``locate_shards``, ``find_prefetches``.

**Header.** The docstring of the module, which is named after the pass. It has the name and one sentence (docs/passes.md prints
them), the graph ``Before:`` and ``After:`` the pass, and the nodes that the pass ``Leaves alone``.
"""
