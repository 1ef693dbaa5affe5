"""Measurements on disk.

  dataset   samples of ops and collectives in a folder that only grows
  parts     the Parquet files of a dataset: written atomically, checked when read, merged
  replays   replayed steps of a problem's plans
"""
