"""Embedding tables: where pools of them come from, how they are accessed, and batches of row ids.

generate        a pool calibrated to the published statistics of dlrm_datasets
public          public lists of tables
statistics      published statistics, and the same statistics of any pool
held_out        tables that are kept for testing
streams         batches of row ids drawn from access statistics
deduplication   samples for each distinct value of some features
hash_tables     buckets of raw ids
heat            lookups of each row, and misses of a cache
host_rows       bytes between a device and its host's memory
hot_rows        tables divided into hot and cold rows
"""
