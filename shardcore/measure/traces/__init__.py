"""Traces of a running job: what each ms of a training step went to.

read_job(folder) -> TracedJob
"""
