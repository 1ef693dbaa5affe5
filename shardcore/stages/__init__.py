"""The work of a stage as a function: of what is asked for, of where it runs, and of where it reports.

The command and the task of the pipeline are a few lines around it.
"""
