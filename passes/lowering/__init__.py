"""From a transformed graph to running code: segments for a compiler, the program that calls them, and its collectives."""
