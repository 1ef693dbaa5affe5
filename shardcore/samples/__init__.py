"""What was measured, on disk.

  dataset   samples of ops and collectives in a folder that only grows, and what is asked of them
  parts     the Parquet files of a dataset: written whole, checked when read, merged
  replays   steps of a problem's plans, as they ran
"""
