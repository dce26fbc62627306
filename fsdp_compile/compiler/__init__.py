"""The ``torch.compile`` backend, its options, and the lowerings that make kernels."""
