"""Embedding tables: where pools of them come from, how they are accessed, and batches of row ids.

  generate        a pool calibrated to the published statistics of dlrm_datasets
  dlrm_datasets   pools read from the files of dlrm_datasets
  public          public lists of tables
  statistics      published statistics, and the same statistics of any pool
  held_out        which tables are kept for testing
  access          how many rows a batch touches, from a table's access statistics
  streams         batches of row ids drawn from them
"""
