"""The backend of ``torch.compile``, and what generates its kernels."""
