"""Models of what a graph costs: time, memory, the hardware that they are of."""
