"""From a transformed graph to running code: segments for a compiler, the program that calls them, and its collectives.

Graphs of ranks that read parameters in different orders get one order of collectives here (:mod:`.arrangement`).
"""
