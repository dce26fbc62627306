"""State: units, their parameters, where shards lie."""
