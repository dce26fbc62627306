"""Plan: find the mesh, batch and policies that train a model fastest on a number of GPUs, by formulae of its step."""
