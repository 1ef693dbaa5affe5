"""Reports for people: text, figures and pages. Pure: data in, text or a matplotlib figure out."""

from shardcore.report.text import markdown_table, percent_change, text_table

__all__ = ["markdown_table", "percent_change", "text_table"]
