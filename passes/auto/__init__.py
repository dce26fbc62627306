"""The automatic schedule: which units share collectives, and where those start."""
