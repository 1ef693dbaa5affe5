"""Prefect tasks. Each wraps shardcore for one of Ray, MLflow and DVC."""
