"""Explain: predict the time, communication and memory of a training step from its graphs, by models of time and memory."""

from .predict import explain, explain_captured
from .report import Report

__all__ = ["Report", "explain", "explain_captured"]
