"""Help with FX graphs: what a node is, writing nodes, values and sizes. ``torch_internals`` is the wall around torch."""
