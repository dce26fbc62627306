"""The automatic schedule: which units share collectives, and where those start.

One pass, :mod:`passes.auto.auto_schedule`, in the place of :mod:`passes.transforms.schedule` and under the same contract
(:mod:`passes.transforms`). The rest decides ahead of the passes: it reads a graph, or a copy on which it tries something,
and returns values.
"""
