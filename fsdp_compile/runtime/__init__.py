"""What runs around graphs, and where there are none: gathers, gradients, agreement between ranks."""
