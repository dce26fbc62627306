"""Collectives: how parameters are laid out over ranks, and what gathers and reduces them, as plain tensor functions."""
