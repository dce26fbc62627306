"""Runs around graphs, and without any: plans, gathers, gradients, agreement between ranks."""
