"""Helpers for FX graphs: nodes, fake values and sizes. ``torch_internals`` is the only place that imports torch's internals."""
