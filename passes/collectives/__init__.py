"""Collectives: the layout of parameters over ranks, and gathers and reductions as plain tensor functions."""
