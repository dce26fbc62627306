"""The automatic schedule: which units share collectives, and where those start.

The package has one pass, :mod:`passes.auto.auto_schedule`, which replaces :mod:`passes.transforms.schedule` and has the same
contract (:mod:`passes.transforms`). The other modules decide before the passes run: they read a graph, or a copy on which they
try something, and return values.
"""
