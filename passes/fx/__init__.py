"""Help with FX graphs: what a node is, writing nodes, values and sizes."""
