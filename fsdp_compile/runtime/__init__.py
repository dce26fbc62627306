"""Runtime code around graphs, and for uncompiled models: plans, gathers, gradients, agreement between ranks."""
