"""Export: plans to and from TorchRec, and statistics of tables from running jobs."""
