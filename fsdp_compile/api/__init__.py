"""What users call: ``fully_shard``, and the methods of the modules that it gives."""
