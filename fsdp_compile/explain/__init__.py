"""Explain: predict the time, communication and memory of a training step from its graphs, by models of time and memory."""
