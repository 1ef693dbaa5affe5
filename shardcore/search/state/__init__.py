"""A plan under construction: shards, their memory and cost, and how they fit."""
