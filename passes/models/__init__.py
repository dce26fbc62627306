"""Models of what a graph costs: time, memory, and the hardware."""
