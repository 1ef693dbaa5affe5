"""Prefect tasks: each wraps shardcore for one of Ray, MLflow and DVC."""
