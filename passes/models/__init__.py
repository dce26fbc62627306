"""Models of the cost of a graph: time, memory, and the hardware."""
