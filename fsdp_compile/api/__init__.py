"""The interface for users: ``fully_shard``, and the methods of sharded modules."""
