"""CUDA code without a GPU."""
