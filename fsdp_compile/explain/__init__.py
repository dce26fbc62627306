"""Explain: what a training step does, costs and holds, from its graphs and the models of time and memory."""
