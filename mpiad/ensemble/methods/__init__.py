"""The methods, one per file: a published table, and the class that `solve` takes.

No other code refers to a method by name. docs/project/map.md describes how to add one.
"""
