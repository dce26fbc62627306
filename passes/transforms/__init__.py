"""The passes: each takes a graph and changes it."""
