"""The passes: each takes a graph and changes it. :mod:`passes.pipeline` lists them in their order.

**A pass is given** an FX graph, as ``Graph`` or, where it reads what the graph owns, as ``GraphModule``; then what stands in no
graph: the plan of a call (:mod:`passes.ir.plan`), the interface that takes new inputs and outputs (:mod:`passes.ir.interface`),
a schedule. It asks nothing else, no model, no process group, no clock: ranks that have the same graph and plan get the same.
From the joint graph on, every node that stands for a tensor has its fake value in ``meta["val"]``.

**It changes the graph in place and returns nothing,** or a note on what it did that nobody needs to read. The graph then passes
``lint()``, has no dead nodes of the pass's making, and every new node has its fake value: :func:`passes.fx.emit.emit` sees to
that for what is written as tensor code. What later passes or the schedule have to find is marked with its work
(:mod:`passes.ir.work`). It leaves alone what is not its own, collectives of the model above all, and a graph without
work for it as a whole. What it cannot do right it refuses, with an error that names the parameter.

**What a later pass can no longer see is asked ahead of the pass that removes it,** by a function beside the pass that reads the
graph, changes nothing and returns values: ``locate_shards``, ``find_prefetches``.

**Its header,** the docstring of a module that has the pass's name, says: the name and in one sentence what it does
(docs/passes.md prints that), the graph ``Before:`` and ``After:`` it, and what it ``Leaves alone``.
"""
