"""Graph passes that turn the two sharding operators into scheduled, bucketed collectives.

FX graph in, FX graph out: this package imports torch and nothing of ``fsdp_compile``. Start with :mod:`passes.ir.ops` (the
intermediate representation) and :mod:`passes.pipeline` (the order in which the passes run).
"""
