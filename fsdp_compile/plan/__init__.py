"""Plan: which mesh, batch and policies train a model fastest on a number of GPUs, by the formulae of its step."""
